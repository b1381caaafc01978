"""The texts of state events: types, keys and ids for the numbers of a folded state (state_at.py).

The rows of the chain cover have the id and the state key of an event. So one ordered pass over an
index and dense rows reads both. They are requested in parts of a thousand, and each part returns
the lines of one text. One row for each event would cost more to send than to find. One text of all
events would be over a megabyte. Both sides would allocate that again each time, which takes a third
of the time at 20,000 events. If a part has an event without a chain position, or a line break in an
id or a user, it is requested again, by rows.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, repeat
from typing import Final, LiteralString, NamedTuple, cast

import orjson

from storage.database.array_text import long_int_array
from storage.database.connection import Connection
from storage.errors import StorageCorrupt
from storage.ids import EventId, StateKey

StateMap = dict[StateKey, EventId]
Items = Iterable[tuple[StateKey, EventId]]

MEMBER: Final = "m.room.member"
PART: Final = 1_000  # memberships in one text

SQL_TEXTS: Final[LiteralString] = """
SELECT part.number, lines.*, NULL AS others
FROM unnest($1::text[]) WITH ORDINALITY AS part (event_nids, number)
CROSS JOIN LATERAL (
    SELECT count(*) AS found, string_agg(event_id, E'\\n' ORDER BY event_nid) AS event_ids,
        string_agg(state_key, E'\\n' ORDER BY event_nid) AS users
    FROM auth_chains
    WHERE event_nid = ANY(part.event_nids::bigint[])
) AS lines
UNION ALL
SELECT NULL, count(*), NULL, NULL, json_agg(json_build_array(t.type, k.state_key, e.event_id)
    ORDER BY e.event_nid)::text
FROM events e
JOIN state_keys k USING (state_key_nid)
JOIN event_types t ON t.type_nid = k.type_nid
-- a subselect, so that the planner does not estimate each of the numbers
WHERE e.event_nid = ANY((SELECT $2::text::bigint[])::bigint[])
"""

SQL_TEXTS_OF_ANY: Final[LiteralString] = """
SELECT e.event_nid, e.event_id, t.type, k.state_key
FROM events e
JOIN state_keys k USING (state_key_nid)
JOIN event_types t ON t.type_nid = k.type_nid
WHERE e.event_nid = ANY($1::bigint[])
"""


class EntryColumnsRow(NamedTuple):
    """How many state events were found, and their texts in the order of their numbers.

    ``number`` of a part: the ids and users of its memberships that have a chain position, a line
    each. None: all ``others``, as a JSON list of [type, state key, id]. Texts are None for no
    events.
    """

    number: int | None
    found: int
    event_ids: str | None
    users: str | None
    others: str | None

    def lines(self, size: int) -> tuple[list[str], list[EventId]] | None:
        """Return users and ids if there are ``size`` events, each of one line."""
        users, event_ids = (self.users or "").split("\n"), (self.event_ids or "").split("\n")
        return (
            (users, cast("list[EventId]", event_ids))
            if self.found == len(users) == len(event_ids) == size
            else None
        )


class EntryTextRow(NamedTuple):
    """The texts of a state event."""

    event_nid: int
    event_id: str
    type: str
    state_key: str


class FoldedState(NamedTuple):
    """A state as the numbers of its events, in order: memberships, and all others."""

    members: list[int]
    others: list[int]


async def state_entries(conn: Connection, states: Sequence[FoldedState]) -> list[StateMap]:
    """Return the entries of these states, by one statement for all of their events."""
    members = _distinct([state.members for state in states])
    others = _distinct([state.others for state in states])
    parts = [members[at : at + PART] for at in range(0, len(members), PART)]
    arguments = list(map(long_int_array, parts)), long_int_array(others)
    found = await conn.fetch(SQL_TEXTS, *arguments, row=EntryColumnsRow)
    rest, *rows = sorted(found, key=lambda row: row.number or 0)
    if rest.found != len(others):
        raise StorageCorrupt(
            "a state refers to events that are not there", wanted=len(others), found=rest.found
        )
    lines = [row.lines(len(part)) for row, part in zip(rows, parts, strict=True)]
    odd = [nid for one, part in zip(lines, parts, strict=True) if one is None for nid in part]
    texts = await texts_of_any(conn, odd) if odd else {}
    named = (_members(one, part, texts) for one, part in zip(lines, parts, strict=True))
    items = chain(_others(rest), chain.from_iterable(named))
    if len(states) == 1:
        return [dict(items)]
    by_nid = dict(zip(chain(others, members), items, strict=True))
    return [dict(map(by_nid.__getitem__, chain(state.others, state.members))) for state in states]


def _distinct(numbers: Sequence[list[int]]) -> list[int]:
    """Return all these numbers in order, each once."""
    return numbers[0] if len(numbers) == 1 else sorted(set[int]().union(*numbers))


def _others(row: EntryColumnsRow) -> Items:
    return (
        ((kind, state_key), event_id)
        for kind, state_key, event_id in orjson.loads(row.others or "[]")
    )


def _members(
    lines: tuple[list[str], list[EventId]] | None,
    part: Sequence[int],
    texts: Mapping[int, EntryTextRow],
) -> Items:
    if lines is None:
        return (((MEMBER, texts[nid].state_key), EventId(texts[nid].event_id)) for nid in part)
    return zip(
        zip(repeat(MEMBER), lines[0], strict=False), lines[1], strict=True
    )  # repeat has no end


async def texts_of_any(conn: Connection, nids: Sequence[int]) -> dict[int, EntryTextRow]:
    """Return the texts of any state events.

    A state that came with an event may have rejected events, which have no chain position.
    """
    texts = {
        row.event_nid: row
        for row in await conn.fetch(SQL_TEXTS_OF_ANY, list(nids), row=EntryTextRow)
    }
    if len(texts) != len(nids):
        raise StorageCorrupt(
            "a state refers to events that are not there", wanted=len(nids), found=len(texts)
        )
    return texts
