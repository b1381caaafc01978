"""Whether an event has the name, the alias or the type of its room: a column of `events`.

Statements read it for all rooms of a user, without the bytes of the events.
"""

from collections.abc import Mapping
from typing import Any, Final

from storage.event.model import Event

DESCRIBING: Final[Mapping[str, str]] = {
    "m.room.canonical_alias": "alias",
    "m.room.create": "type",
    "m.room.name": "name",
}
"""The key of the content, by event type."""


def describes_room(event: Event) -> bool | None:
    """Return whether it does; None for an event of another type, or with a state key."""
    if event.state_key != "":
        return None
    return describes(event.type, event.content)


def describes(event_type: str, content: Mapping[str, Any]) -> bool | None:
    """Return whether this content does; None for another type.

    An empty text is no name and no alias, but it is a type.
    """
    key = DESCRIBING.get(event_type)
    if key is None:
        return None
    value = content.get(key)
    return isinstance(value, str) and (value != "" or event_type == "m.room.create")
