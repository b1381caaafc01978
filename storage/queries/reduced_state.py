"""The state before a join, without most members: the response to send_join may omit them (MSC3706).

The members that stay are those that the join cites, and the heroes of a room without a name and an
alias. The other entries come from the rows of the state group, whose members are not read.

Source: server-server API, `PUT /_matrix/federation/v2/send_join`, `omit_members`.
"""

from typing import Final, LiteralString, NamedTuple

from storage.database.columns import AUTH_NIDS
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.errors import StateUnknown, UnknownEvent
from storage.ids import EventId
from storage.queries.state_at import lost, states_at
from storage.queries.state_entries import MEMBER

SQL_STATE_BEFORE_JOIN: Final[LiteralString] = compose(
    """
WITH
joined AS MATERIALIZED (
    SELECT e.room_nid, e.stream_ordering, e.state_group_before,
        :auth_nids.call AS auth_nids, k.state_key AS user_id
    FROM events e
    JOIN state_keys k USING (state_key_nid)
    WHERE e.event_id = $1::text
),
entry AS MATERIALIZED (
    SELECT s.state_key_nid, e.event_nid, e.event_id
    FROM joined
    CROSS JOIN LATERAL state_but_members(joined.state_group_before) AS s
    LEFT JOIN events e USING (event_nid)
)
SELECT COALESCE(j.state_group_before, 0) AS state_group,
    ARRAY(SELECT event_id FROM entry) AS event_ids,
    EXISTS (SELECT FROM entry WHERE event_nid IS NULL) AS is_lost,
    ARRAY(
        SELECT k.state_key
        FROM events e
        JOIN state_keys k USING (state_key_nid)
        WHERE e.event_nid = ANY(j.auth_nids) AND k.type_nid = 2
    ) AS cited,
    CASE WHEN EXISTS (SELECT FROM entry WHERE state_key_nid IN (9, 11)) THEN '{}'
        ELSE heroes_of(j.room_nid, j.stream_ordering - 1, '{4,5}', j.user_id) END AS heroes
FROM joined j
""",
    AUTH_NIDS,
).sql


class StateBeforeJoinRow(NamedTuple):
    """The entries of a state without members, and the users whose membership is wanted as well.

    ``state_group`` is 0 for an outlier.
    """

    state_group: int
    event_ids: list[str]
    is_lost: bool
    cited: list[str]
    heroes: list[str]


async def reduced_state(conn: Connection, join: EventId) -> frozenset[EventId]:
    """Return the ids of the state before a join, with the members that a server needs first.

    `UnknownEvent`, `StateUnknown` for an outlier, `StorageCorrupt`.

    A state never changes, so two statements need no common snapshot.
    """
    row = await conn.fetchrow(SQL_STATE_BEFORE_JOIN, join, row=StateBeforeJoinRow)
    if row is None:
        raise UnknownEvent(join)
    if not row.state_group:
        raise StateUnknown(join)
    if row.is_lost:
        raise lost(row.state_group, join)
    keys = [(MEMBER, user) for user in {*row.cited, *row.heroes}]
    members = (await states_at(conn, [join], after=False, keys=keys))[join]
    return frozenset({*map(EventId, row.event_ids), *members.values()})
