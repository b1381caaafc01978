"""Check the states that a caller of `append` gives as `state_before`.

A state has at most one event per key and no rejected event. Ids of events that are not stored are
no error: the result `missing_parents` lists them. An event of the same batch is checked by its key
only, because it is not authorised yet.
"""

from collections.abc import Iterable, Mapping
from typing import Final, LiteralString, NamedTuple

from storage import arguments as args
from storage.database.connection import Database
from storage.errors import InputError
from storage.event import Event
from storage.ids import EventId, StateKey

States = Mapping[EventId, tuple[EventId, ...]]

SQL_GIVEN: Final[LiteralString] = """
SELECT e.event_id, t.type, k.state_key, e.rejected
FROM unnest($1::text[]) AS wanted (id)
CROSS JOIN LATERAL (SELECT * FROM events WHERE event_id = wanted.id OFFSET 0) AS e
CROSS JOIN LATERAL (
    SELECT * FROM state_keys WHERE state_key_nid = e.state_key_nid OFFSET 0
) AS k
CROSS JOIN LATERAL (SELECT type FROM event_types WHERE type_nid = k.type_nid OFFSET 0) AS t
"""


GivenStates = Mapping[EventId, Iterable[EventId]] | Mapping[str, Iterable[str]]
"""The ids of the state before an event, by its id."""


class GivenRow(NamedTuple):
    """A stored state event."""

    event_id: str
    type: str
    state_key: str
    rejected: str | None


def read(state_before: GivenStates | None) -> States:
    """Return the states as tuples of distinct event ids.

    Raise `InputError` if it is not a mapping of lists, and `InvalidIdentifier` for a malformed id.
    """
    if state_before is None:
        return {}
    return {
        EventId(event_id): tuple(args.events(ids))
        for event_id, ids in args.mapping(state_before, "state_before").items()
    }


async def check(database: Database, states: States, batch: Iterable[Event]) -> None:
    """Raise `InputError` for a state with two events of one key, or with a rejected event."""
    if not states:
        return
    keys = {event.event_id: event.key for event in batch if event.state_key is not None}
    ids = list({event_id for state in states.values() for event_id in state})
    async with database.connection() as conn:
        held = {row.event_id: row for row in await conn.fetch(SQL_GIVEN, ids, row=GivenRow)}
    keys.update((EventId(row.event_id), (row.type, row.state_key)) for row in held.values())
    for event_id, state in states.items():
        _check_state(event_id, state, keys, held)


def _check_state(
    event_id: EventId,
    state: Iterable[EventId],
    keys: Mapping[EventId, StateKey],
    held: Mapping[str, GivenRow],
) -> None:
    found: dict[StateKey, EventId] = {}
    for one in state:
        if one in held and held[one].rejected is not None:
            raise InputError(
                f"state_before of {event_id} holds {one}, which is rejected: {held[one].rejected}"
            )
        if one not in keys:
            continue
        first = found.setdefault(keys[one], one)
        if first != one:
            raise InputError(
                f"state_before of {event_id} holds two events of {keys[one]}: {first} and {one}"
            )
