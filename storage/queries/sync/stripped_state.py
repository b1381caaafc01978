"""What those who are invited, or who knock, are shown of a room: stripped state.

Client-server API, "Stripped state". It is what came with the membership event from another server,
beside it or in it; otherwise a few events of the current state. The own membership event is always
among them.
"""

from collections.abc import Sequence
from typing import Any, Final

from storage.queries.events import StoredEvent

BROUGHT: Final = ("invite_room_state", "knock_room_state")


def stripped(
    shown: Sequence[StoredEvent], own: StoredEvent | None, brought: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """What is shown of a room: ``shown`` of its state (state.py), and the ``own`` membership event, which may have brought something better.

    ``brought``: what came beside it (``append(stripped_state=…)``), well-formed.
    """
    if own is None:
        return [strip(event.json) for event in shown]
    state = (
        [strip(event) for event in brought]
        or _brought(own)
        or [strip(event.json) for event in shown]
    )
    key = (own.type, own.state_key)
    return [
        *(event for event in state if (event["type"], event["state_key"]) != key),
        strip(own.json),
    ]


def _brought(own: StoredEvent) -> list[dict[str, Any]]:
    """The well-formed events that the membership event has in its `unsigned`; another server says what it likes there."""
    unsigned = own.json.get("unsigned")
    if not isinstance(unsigned, dict):
        return []
    given = next((value for name in BROUGHT if isinstance(value := unsigned.get(name), list)), [])
    return [strip(event) for event in given if isinstance(event, dict) and _is_stripped(event)]


def _is_stripped(event: dict[str, Any]) -> bool:
    return all(
        isinstance(event.get(name), str) for name in ("type", "state_key", "sender")
    ) and isinstance(event.get("content"), dict)


def strip(event: dict[str, Any]) -> dict[str, Any]:
    """The four keys of a stripped event."""
    return {name: event[name] for name in ("type", "state_key", "sender", "content")}
