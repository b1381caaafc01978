"""Ranges that are cut into rows give the same answers as before.

Compare one room in a store that cuts early with one in a store that never cuts.
"""

import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final

import pytest

import storage
from storage import Store, UnknownEvent
from storage.config import Config
from storage.database.connection import Connection
from storage.ids import EventId, UserId
from storage.maintenance.purge import purge_history
from storage.queries import context as contexts
from storage.queries import messages
from storage.queries.pagination.page import Direction, between
from storage.rebuild import rebuild
from storage.testing import BuiltEvent, RoomBuilder
from storage.visibility import multirange, rule
from tests.maintenance.rooms import findings
from tests.oracle.example_databases import execute
from tests.oracle.test_store import SQL_NO_SLACK
from tests.postgres import others_ended

SERVER: Final = "s1.test"
ADMIN, FLAPPER, OTHER, ERASED = (
    f"@{name}:{SERVER}" for name in ("admin", "flapper", "other", "erased")
)
BOT: Final = "@bot:s2.test"
USERS: Final = (FLAPPER, OTHER, ADMIN)
SERVERS: Final = (SERVER, "s2.test", "s3.test")
VISIBILITIES: Final = ("joined", "joined", "invited", "shared", "world_readable")
NEVER: Final = 1_000_000


@asynccontextmanager
async def opened(
    dsn: str, monkeypatch: pytest.MonkeyPatch, ranges_max: int
) -> AsyncIterator[Store]:
    """Open a store that cuts rows at so many ranges and scans no range without result.

    Its walks by time read few events only.
    """
    monkeypatch.setattr(rule, "RANGES_MAX", ranges_max)
    monkeypatch.setattr(multirange, "SLACK", 0)
    monkeypatch.setattr(multirange, "AROUND", 1)
    await execute(dsn, SQL_NO_SLACK)
    async with storage.open(dsn, server_name=SERVER, config=Config(traversal_rows_max=5)) as store:
        yield store


def flapping(seed: int, steps: int = 100) -> RoomBuilder:
    """Return a room with changing members, also on old forks, and changing history visibility."""
    rng = random.Random(seed)
    room = RoomBuilder("11", seed=seed, sign=False)
    room.start(ADMIN, history_visibility=rng.choice(VISIBILITIES))
    room.join(ERASED)
    for _ in range(steps):
        branch = (
            room.at(rng.choice(room.events[6:]))
            if len(room.events) > 30 and rng.random() < 0.25
            else room
        )
        for _ in range(rng.randrange(1, 4)):
            _something(branch, rng)
        if branch is not room:
            room.merge(room, branch)
    for event in rng.sample(room.events[10:], 3):
        room.at(event).message(ADMIN)
    return room


def _something(room: RoomBuilder, rng: random.Random) -> None:
    what = rng.random()
    user = rng.choice((FLAPPER, FLAPPER, OTHER, BOT))
    if what < 0.1:
        room.history_visibility(ADMIN, rng.choice(VISIBILITIES))
    elif what < 0.3:
        room.message(rng.choice((ADMIN, ERASED)))
    elif room.membership(user) == "join":
        room.leave(user)
    elif room.membership(user) in {None, "leave"} and what < 0.5:
        room.invite(ADMIN, user)
    else:
        room.join(user)


async def filled(store: Store, room: RoomBuilder) -> None:
    """Store the room in parts."""
    events = room.events
    for at in range(0, len(events), 17):
        await store.append([event.pdu for event in events[at : at + 17]], room_version="11")
    await store.erase_user(ERASED)


async def told(store: Store, room: RoomBuilder, some: list[BuiltEvent]) -> dict[str, Any]:
    """All that visibility has a say in."""
    ids = [event.event_id for event in room.events]
    answers: dict[str, Any] = {
        server: await store.visible_to_server(server, ids) for server in SERVERS
    }
    for server in SERVERS:
        sent = await store.backfill(
            room.room_id, await store.forward_extremities(room.room_id), 100, server_name=server
        )
        answers[f"sent to {server}"] = [(event.event_id, event.withheld) for event in sent]
    for user in USERS:
        answers[user] = await store.visible_to_user(user, ids)
        answers[f"{user} sync"] = _timelines(await store.sync(user, timeline_limit=20))
        for direction in ("b", "f"):
            for limit in (1, 7, 100):
                answers[f"{user} {direction} {limit}"] = await _walk(
                    store, room, user, direction, limit, None
                )
        for event in some:
            answers[f"{user} at {event.event_id}"] = await _around(store, room, user, event)
    return answers


async def _walk(
    store: Store, room: RoomBuilder, user: str, direction: Any, limit: int, token: str | None
) -> list[tuple[str, bool]]:
    found: list[tuple[str, bool]] = []
    while len(found) < 500:
        page = await store.messages(
            room.room_id, user, from_=token, direction=direction, limit=limit
        )
        found += [(event.event_id, event.withheld) for event in page.chunk]
        token = page.end
        if token is None:
            break
    return found


async def _around(store: Store, room: RoomBuilder, user: str, event: BuiltEvent) -> list[Any]:
    answers: list[Any] = []
    for direction in ("b", "f"):
        near = await store.event_near(room.room_id, user, event.origin_server_ts, direction)
        answers.append(near and near.event_id)
    try:
        context = await store.context(event.event_id, user, limit=9)
    except UnknownEvent:
        return answers
    answers += [
        [one.event_id for one in part] for part in (context.events_before, context.events_after)
    ]
    return [
        *answers,
        *[
            await _walk(store, room, user, way, 5, token)
            for way, token in (("b", context.start), ("f", context.end))
        ],
    ]


def _timelines(answer: Any) -> list[Any]:
    rooms = [*answer.join.items(), *answer.leave.items()]
    return [
        (room_id, [event.event_id for event in one.timeline.events], one.timeline.limited)
        for room_id, one in rooms
    ]


async def rows(store: Store) -> int:
    async with store.database.connection() as conn:
        return int(await conn.fetchval("SELECT count(*) FROM past_visibility"))


SQL_WHOLE: Final = """
SELECT json_agg(json_build_array(p.name, w.audiences::text, w.invited_audiences::text)
    ORDER BY p.name)::text
FROM whole_visibility w JOIN principals p USING (principal_nid)
WHERE w.audiences <> '{}'
"""


async def whole(store: Store) -> str:
    async with store.database.connection() as conn:
        return str(await conn.fetchval(SQL_WHOLE))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(int(os.environ.get("STORAGE_EXAMPLES", "1"))))
async def test_cut_rows_tell_what_whole_rows_do(
    dsn: str, another_dsn: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    room = flapping(seed)
    some = random.Random(seed).sample(room.events, 6)
    async with opened(dsn, monkeypatch, NEVER) as store:
        await filled(store, room)
        expected, ranges = await told(store, room, some), await whole(store)
        assert await rows(store) == 0
    async with opened(another_dsn, monkeypatch, 1) as store:
        await filled(store, room)
        assert await rows(store) > 10
        assert await whole(store) == ranges
        answers = await told(store, room, some)
        assert {what: answer for what, answer in answers.items() if answer != expected[what]} == {}
        assert await findings(store) == []
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert await rows(store) > 10
        assert await findings(store) == []
        answers = await told(store, room, some)
        assert {what: answer for what, answer in answers.items() if answer != expected[what]} == {}


def bridge(flaps: int) -> RoomBuilder:
    """Return a room in which two users came and went so many times, and are joined.

    One of them is the only user of another server.
    """
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN, history_visibility="joined")
    for _ in range(flaps):
        for user in (FLAPPER, BOT):
            room.join(user)
        room.message(ADMIN)
        for user in (FLAPPER, BOT):
            room.leave(user)
    room.join(FLAPPER)
    return room


SQL_LONGEST: Final = """
SELECT max(n) FROM (
    SELECT (SELECT count(*) FROM unnest(audiences)) AS n FROM visibility
    UNION ALL
    SELECT (SELECT count(*) FROM unnest(audiences)) FROM past_visibility
) AS rows
"""
SQL_PROBES: Final = """
SELECT sum(COALESCE(idx_scan, 0) + seq_scan)::int
FROM pg_stat_xact_user_tables
WHERE relname IN ('audiences', 'visibility', 'past_visibility')
"""


async def test_rows_stay_short_and_reads_look_up_no_more(dsn: str) -> None:
    probes: dict[str, list[int]] = {}
    async with storage.open(dsn, server_name=SERVER) as store:
        for flaps in (15, 150):
            room = bridge(flaps)
            await store.append(room.pdus, room_version="11")
            ids = [event.event_id for event in room.events]
            middle = ids[len(ids) // 2]
            async with store.database.transaction() as conn:
                place = await messages_at(conn, room, middle)
                pages: list[tuple[Direction, str | None]] = [
                    ("b", None),
                    ("b", place),
                    ("f", None),
                    ("f", place),
                ]
                for direction, from_ in pages:
                    asked = between(from_, None, direction, 10, store.deployment_id)
                    before = await conn.fetchval(SQL_PROBES)
                    page = await messages.messages(
                        conn,
                        room.room_id,
                        UserId(FLAPPER),
                        asked,
                        store.deployment_id,
                        rows_max=100,
                    )
                    assert len(page.chunk) == 10
                    probes.setdefault(f"{direction} {from_ is None}", []).append(
                        await conn.fetchval(SQL_PROBES) - before
                    )
        async with store.database.connection() as conn:
            assert await conn.fetchval(SQL_LONGEST) <= 2 * rule.RANGES_MAX
    for few, many in probes.values():
        assert many <= 1.5 * few, probes


async def messages_at(conn: Connection, room: RoomBuilder, event_id: EventId) -> str:
    """A token of the place of an event."""
    deployment = await conn.fetchval("SELECT deployment_id FROM deployment")
    return (
        await contexts.context(conn, event_id, UserId(ADMIN), limit=0, deployment=deployment)
    ).start


@pytest.mark.parametrize(
    "damage, check",
    [
        ("DELETE FROM past_visibility WHERE first_audience > 0", "visibility"),
        ("UPDATE past_visibility SET audiences = '{}'", "visibility"),
        ("UPDATE past_visibility SET audiences = '{[0,)}'", "visibility"),
        ("UPDATE past_visibility SET invited_audiences = audiences", "visibility"),
        ("UPDATE past_visibility SET topological_ranges = '{}'", "audiences"),
        ("UPDATE past_visibility SET opened_topological = opened_topological + 1", "audiences"),
        ("UPDATE visibility SET first_audience = NULL", "visibility"),
    ],
)
async def test_verify_finds_what_is_wrong_in_old_rows(dsn: str, damage: str, check: str) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        room = bridge(40)
        await store.append(room.pdus, room_version="11")
        assert await findings(store) == []
        async with store.database.connection() as conn:
            await conn.execute(damage)
        assert check in {finding.check for finding in await findings(store)}
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert await findings(store) == []


SQL_KEPT: Final = (
    "SELECT DISTINCT p.name FROM past_visibility JOIN principals p USING (principal_nid)"
)


async def test_a_purge_that_forgets_who_saw_nothing_of_what_is_left_forgets_old_rows(
    dsn: str,
) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        room = bridge(40)
        room.leave(FLAPPER)
        last = [room.topic(ADMIN, str(number)) for number in range(100)][-1]
        await store.append(room.pdus, room_version="11")
        assert await rows(store) > 4
        await others_ended(store.database)
        await purge_history(
            store.database, room.room_id, server_name=SERVER, before_event_id=last.event_id
        )
        async with store.database.connection() as conn:
            assert await conn.fetchvals(SQL_KEPT) == ["s2.test"], (
                "a server that was joined is remembered"
            )
        assert await findings(store) == []
