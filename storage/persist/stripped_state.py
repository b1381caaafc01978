"""Stripped state that a caller of `append` gives with what comes out of band: what another server shows of a room."""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from storage import arguments as args
from storage.errors import InputError
from storage.ids import EventId

StrippedState = Mapping[EventId, Iterable[Mapping[str, Any]]]

BYTES_MAX: Final = 262_144
"""Of the stripped state of one event, as JSON.

A room shows some ten events of its state, of at most 65,536 bytes each and far less as a rule.
"""

TEXTS: Final = ("type", "state_key", "sender")


def read_stripped_state(stripped_state: StrippedState | None, origin: str) -> dict[EventId, str]:
    """Return the stripped states as JSON, by event.

    `InputError` for what is malformed or too large, or given with another origin.
    """
    given = {} if stripped_state is None else args.mapping(stripped_state, "stripped_state")
    if given and origin != "out_of_band":
        raise InputError(f'stripped_state goes with origin="out_of_band", not with {origin!r}')
    return {args.event(event_id): _json(event_id, events) for event_id, events in given.items()}


def _json(event_id: EventId, events: Iterable[Mapping[str, Any]]) -> str:
    name = f"stripped_state of {event_id}"
    written = [
        _event(event, f"{name}, event {number},")
        for number, event in enumerate(args.listed(events, name))
    ]
    if (size := sum(map(len, written))) > BYTES_MAX:
        raise InputError(f"{name} has {size} bytes: at most {BYTES_MAX} can be stored")
    return (b"[" + b",".join(written) + b"]").decode()


def _event(event: Mapping[str, Any], name: str) -> bytes:
    packed = args.content(event, name)
    found = orjson.loads(packed)
    for key in TEXTS:
        if not isinstance(found.get(key), str):
            raise InputError(f"{name} has no text as {key}")
    if not isinstance(found.get("content"), dict):
        raise InputError(f"{name} has no object as content")
    return packed
