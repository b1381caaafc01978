"""The relation of an event: its ``m.relates_to``, in clear text even in encrypted events.

Source: client-server API, "Forming relationships between events". An ``m.relates_to`` of another
form is no relation, and no error. A rich reply alone (``m.in_reply_to`` without a ``rel_type``) is
no relation. A create event has none, because nothing came before it.
"""

from hashlib import sha256
from typing import Any, Final, NamedTuple, TypeGuard

from storage.event.model import Event

REPLACE: Final = "m.replace"
ANNOTATION: Final = "m.annotation"
REFERENCE: Final = "m.reference"
THREAD: Final = "m.thread"
TEXT_BYTES_MAX: Final = 255  # of ids and types


class Relation(NamedTuple):
    """A relation to ``event_id``, which may be missing or not exist.

    ``replaces`` is None unless the type is m.replace. It is True if the event itself allows it to
    replace another: it is no state event, and has an ``m.new_content`` or is encrypted, so that
    nobody can check.
    """

    rel_type: str
    event_id: str
    replaces: bool | None


def relation_of(event: Event) -> Relation | None:
    """Return the relation of an event; None if it has none."""
    content = event.content
    relates_to = content.get("m.relates_to")
    if not isinstance(relates_to, dict) or event.type == "m.room.create":
        return None
    rel_type, event_id = relates_to.get("rel_type"), relates_to.get("event_id")
    if (
        not _is_name(rel_type)
        or not _is_name(event_id)
        or event_id[0] != "$"
        or event_id == event.event_id
    ):
        return None
    replaces = (
        None
        if rel_type != REPLACE
        else event.state_key is None
        and ("m.new_content" in content or event.type == "m.room.encrypted")
    )
    return Relation(rel_type, event_id, replaces)


def target_key(event_id: str) -> int:
    """Return the number under which relations to an event are indexed, stored or not.

    It is computed from the id, as by `relation_key` in the schema.
    """
    return int.from_bytes(sha256(event_id.encode()).digest()[:8], "big", signed=True)


def _is_name(value: Any) -> TypeGuard[str]:
    return (
        isinstance(value, str) and 0 < len(value.encode()) <= TEXT_BYTES_MAX and "\0" not in value
    )
