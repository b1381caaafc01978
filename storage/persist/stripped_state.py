"""Check the stripped state that a caller of `append` gives with out-of-band events.

It is the part of a room's state that another server shares with an invite or knock.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import orjson

from storage import arguments as args
from storage.errors import InputError
from storage.ids import EventId

Stripped = Iterable[Mapping[str, Any]]
StrippedState = Mapping[EventId, Stripped] | Mapping[str, Stripped]

BYTES_MAX: Final = 262_144
"""Maximum size of the stripped state of one event, as JSON.

A room shares some ten state events. Each has at most 65,536 bytes, and most are far smaller.
"""

TEXTS: Final = ("type", "state_key", "sender")


def read_stripped_state(stripped_state: StrippedState | None, origin: str) -> dict[EventId, str]:
    """Return the stripped states as JSON, by event.

    Raise `InputError` if one is malformed, too large, or given with another origin.
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
