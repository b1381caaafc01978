"""Visibility alone, in many more rooms than the whole machine has time for, on one database.

After every delivery each (event, user) and (event, server) is compared with the oracle. The end of
a room also compares its pages in both directions, context of some events, and withheld events,
because some senders were erased. `STORAGE_ROOMS` says how many rooms; the default is for every day.
"""

import asyncio
import os
from collections.abc import Collection
from contextlib import AsyncExitStack
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st

from storage.ids import EventId, RoomId, UserId, server_name_of
from storage.visibility import multirange, rule
from tests.conftest import _fresh_database
from tests.oracle.example_databases import execute
from tests.oracle.facts import Audience, Facts, near
from tests.oracle.machine import RoomMachine, run_machine
from tests.oracle.oracle import Oracle
from tests.oracle.store_subject import StoreSubject
from tests.oracle.test_store import SQL_NO_SLACK
from tests.oracle.worlds import SERVERS, USERS

ROOMS = int(os.environ.get("STORAGE_ROOMS", "15"))
SERVER = "s2.test"
LOCAL = tuple(user for user in USERS if server_name_of(user) == SERVER)
ERASED = {USERS[0], USERS[2]}
LIMIT = 1_000
# 0: every crossing event is out of range. 2: rooms have no out-of-range events, and small effects
# beside a whole page still show.
SLACKS = [0, 2]
FEW = 12  # one of so many events is looked at together with its surroundings

SQL_SEEN = """
SELECT i.name, ARRAY(
        SELECT e.event_id
        FROM events e
        CROSS JOIN LATERAL visibility_of(e.room_nid, COALESCE(p.principal_nid, 0)) AS s
        WHERE e.room_nid = r.room_nid AND CASE
            WHEN i.name LIKE '@%' THEN user_sees(e, s.joined_since, s.own_audiences,
                s.shared_audiences, s.world_audiences,
                s.shared_before, s.reader_nid, s.unread)
            ELSE server_sees(e, s.own_audiences, s.shared_audiences, s.world_audiences,
                s.reader_nid, s.unread)
                AND server_gets(e, s.joined_audiences, s.world_audiences, s.reader_nid, s.unread)
        END
    )
FROM rooms r
CROSS JOIN unnest($2::text[]) AS i (name)
LEFT JOIN principals p USING (name)
WHERE r.room_id = $1::text
"""


def seen(oracle: Oracle, room_id: RoomId, audience: Audience) -> dict[str, set[EventId]]:
    """Return the events that are visible to each user and server."""
    held = [event_id for event_id, one in oracle.held.items() if one.event.room_id == room_id]
    users = {user: oracle.visible_to_user(user, held) for user in audience.users}
    return users | {server: oracle.visible_to_server(server, held) for server in audience.servers}


def sights(oracle: Oracle, room_id: RoomId, audience: Audience) -> Facts:
    """Return visible events, pages, and which of the events are withheld.

    Servers have an event as `visible_to_server` names it if they may have it whole.
    """
    timeline = oracle.timeline(room_id)
    latest = sorted(oracle.forward_extremities(room_id))
    some = sorted(timeline)[::FEW]
    times = {oracle.get(one).event.origin_server_ts for one in some}
    return {
        "seen": {
            principal: {
                one
                for one in ids
                if principal in audience.users or not withheld(oracle, one, principal)
            }
            for principal, ids in seen(oracle, room_id, audience).items()
        },
        "pages": {
            user: [(one, withheld(oracle, one, user)) for one in oracle.messages(room_id, user)]
            for user in audience.users
        },
        "pages forwards": {
            user: oracle.messages(room_id, user, direction="f") for user in audience.users
        },
        "context": {
            user: {one: oracle.context(one, user, 5) for one in some} for user in audience.users
        },
        "near": {
            user: {time: near(oracle, room_id, user, time) for time in times}
            for user in audience.users
        },
        "sent": {
            server: {
                one: hidden or withheld(oracle, one, server)
                for one, hidden in oracle.sent(
                    server, room_id, oracle.backfill(room_id, latest, LIMIT)
                ).items()
            }
            for server in audience.servers
        },
    }


def withheld(oracle: Oracle, event_id: EventId, principal: str) -> bool:
    """Return whether the sender is erased and the reader was not joined at the event.

    If it is the reader's own membership, they were not joined after it either.
    """
    event = oracle.get(event_id).event
    states = [oracle.state_before(event_id)]
    target = event.state_key if event.type == "m.room.member" and event.state_key else None
    if target is not None and principal in {target, server_name_of(target)}:
        states.append(oracle.state_after(event_id))
    joined = {
        user
        for state in states
        for kind, user in state
        if kind == "m.room.member"
        and oracle.membership_in(state, user) == "join"
        and principal in {user, server_name_of(user)}
    }
    return event.sender in ERASED and not joined


class SeenEventsRow(NamedTuple):
    """The events of a room that are visible to one user or server."""

    principal: str
    event_ids: list[str]


class SightSubject(StoreSubject):
    """Query visibility alone.

    While a room grows, one statement covers all readers; at its end, the reads do.
    """

    def __init__(self, dsn: str, *, server_name: str) -> None:
        super().__init__(dsn, server_name=server_name)
        self.used: set[int] = set()
        for user in ERASED:
            self.run(self.store.erase_user(UserId(user)))

    async def _facts(
        self, room_id: RoomId, audience: Audience, known: Collection[EventId]
    ) -> Facts:
        if not known:
            return await self._sights(room_id, audience)
        async with self.store.database.connection() as conn:
            rows = await conn.fetch(
                SQL_SEEN, room_id, [*audience.users, *audience.servers], row=SeenEventsRow
            )
        return {"seen": {row.principal: set(row.event_ids) for row in rows}}

    async def _sights(self, room_id: RoomId, audience: Audience) -> Facts:
        rows = await self._held(room_id)
        held = [EventId(row.event_id) for row in rows]
        some = sorted(EventId(row.event_id) for row in rows if not row.outlier)[::FEW]
        times = {
            event.json["origin_server_ts"] for event in (await self.store.events(some)).values()
        }
        latest = sorted(await self.store.forward_extremities(room_id))
        users = {user: await self.store.visible_to_user(user, held) for user in audience.users}
        servers = {
            server: await self.store.visible_to_server(server, held) for server in audience.servers
        }
        pages = {
            user: await self.store.messages(room_id, UserId(user), limit=LIMIT)
            for user in audience.users
        }
        sent = {
            server: await self.store.backfill(room_id, latest, LIMIT, server_name=server)
            if latest
            else []
            for server in audience.servers
        }
        return {
            "seen": users | servers,
            "pages": {
                user: [(one.event_id, one.withheld) for one in page.chunk]
                for user, page in pages.items()
            },
            "pages forwards": {
                user: await self._messages(room_id, user, "f", 7) for user in audience.users
            },
            "context": {
                user: {one: await self._context(one, user) for one in some}
                for user in audience.users
            },
            "near": {
                user: {time: await self._near(room_id, user, time) for time in times}
                for user in audience.users
            },
            "sent": {
                server: {one.event_id: one.withheld for one in found}
                for server, found in sent.items()
            },
        }


@pytest.mark.timeout(0)
@pytest.mark.parametrize("slack", SLACKS)
def test_everybody_sees_what_the_rule_says(
    server_dsn: str, template_name: str, worker_id: str, monkeypatch: pytest.MonkeyPatch, slack: int
) -> None:
    """An example that is run again finds its rooms in the database, and so begins another one."""
    opened: list[tuple[asyncio.Runner, AsyncExitStack, SightSubject]] = []

    class Machine(RoomMachine):
        audience = Audience(LOCAL, SERVERS)
        syncing = ()
        seeds = st.binary(min_size=8, max_size=8).map(lambda drawn: int.from_bytes(drawn) >> 1)

        def open_subject(self) -> SightSubject:
            if opened and {self.seed, self.seed + 1} & opened[-1][2].used:
                close(*opened.pop())
            if not opened:
                runner, stack = asyncio.Runner(), AsyncExitStack()
                dsn = runner.run(
                    stack.enter_async_context(_fresh_database(server_dsn, template_name, worker_id))
                )
                with_slack(dsn, monkeypatch, slack)
                opened.append((runner, stack, SightSubject(dsn, server_name=SERVER)))
            opened[-1][2].used |= {self.seed, self.seed + 1}
            return opened[-1][2]

        def expected(self, room_id: RoomId, known: Collection[EventId]) -> Facts:
            if known:
                return {"seen": seen(self.oracle, room_id, self.audience)}
            return sights(self.oracle, room_id, self.audience)

    try:
        run_machine(Machine, examples=ROOMS, steps=20)
    finally:
        while opened:
            close(*opened.pop())


def with_slack(dsn: str, monkeypatch: pytest.MonkeyPatch, slack: int) -> None:
    """The database and this process allow for so much crossing in the order.

    Ranges are cut into rows as soon as can be.
    """
    monkeypatch.setattr(multirange, "SLACK", slack)
    monkeypatch.setattr(multirange, "AROUND", 1)
    monkeypatch.setattr(rule, "RANGES_MAX", 1)
    asyncio.run(execute(dsn, SQL_NO_SLACK.replace("0::", f"{slack}::")))


def close(runner: asyncio.Runner, stack: AsyncExitStack, subject: Any) -> None:
    """The store, then its database."""
    subject.run(subject.stack.aclose())
    subject.runner.close()
    runner.run(stack.aclose())
    runner.close()
