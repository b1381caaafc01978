"""Stripped state: the part of a room that an invited or knocking user sees.

Client-server API, "Stripped state". It is the stripped state that came with the membership event
from another server, beside it or in it. Otherwise it is a few events of the current state. The
user's own membership event is always part of it.
"""

from collections.abc import Sequence
from typing import Any, Final

from storage.queries.events import StoredEvent

BROUGHT: Final = ("invite_room_state", "knock_room_state")


def stripped(
    shown: Sequence[StoredEvent], own: StoredEvent | None, brought: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """Return the stripped state: that which came with the ``own`` event, or else ``shown``.

    ``shown`` are events of the current state (state.py), ``own`` is the membership event.
    ``brought`` is stripped state that came beside it (``append(stripped_state=…)``), well-formed.
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
    """Return the well-formed events in the `unsigned` of the membership event.

    Another server can send anything there.
    """
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
    """Return the four keys of a stripped event."""
    return {name: event[name] for name in ("type", "state_key", "sender", "content")}
