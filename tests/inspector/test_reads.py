"""The reads of storage.queries.inspect against the store's other answers, on a lively room."""

import time
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import pytest

import storage
from storage import Store, UserId
from storage.database.columns import OWN_ENTRIES
from storage.database.connection import Connection
from storage.database.placeholders import compose
from storage.ids import EventId, RoomId
from storage.queries.inspect import lines, resolution
from storage.queries.inspect import rooms as growth
from storage.queries.inspect import rooms as room_lists
from storage.queries.inspect import rooms as search
from storage.queries.inspect import rooms as writers
from storage.queries.inspect.rooms import running
from storage.state.groups import REMOVED
from storage.testing import Odd, RoomBuilder, build_room, deliver_with_gap
from tests.maintenance.rooms import LIVELY, SERVER, deliver

ALICE = UserId(f"@alice:{SERVER}")


T = TypeVar("T")


async def ask(store: Store, query: Callable[..., Awaitable[T]], *args: Any, **how: Any) -> T:
    """Run a query in a snapshot."""
    return await store.reads.run(lambda conn: query(conn, *args, **how), snapshot=True)


class SizeRow(NamedTuple):
    event_id: EventId
    stored_bytes: int


class EventAudienceRow(NamedTuple):
    event_id: EventId
    audience: int


class EventArrivalRow(NamedTuple):
    stream_ordering: int
    received_ts: int


class OwnEntryRow(NamedTuple):
    state_key_nid: int
    event_nid: int


SQL_OWN = compose(
    """
SELECT own.state_key_nid, own.event_nid
FROM state_groups g
CROSS JOIN LATERAL :own_entries.call(g) AS own
WHERE g.state_group = $1::bigint
""",
    OWN_ENTRIES,
).sql


async def stored_sizes(conn: Connection) -> dict[EventId, int]:
    """The bytes of the stored forms, as the database counts them."""
    sql = "SELECT event_id, octet_length(json) FROM events"
    return dict(await conn.fetch(sql, row=SizeRow))


class Delivered(NamedTuple):
    room: RoomBuilder
    room_id: RoomId
    ids: list[EventId]
    """Of the stored events."""


@pytest.fixture
async def delivered(store: Store) -> Delivered:
    room = build_room(
        LIVELY.replaced(odd=Odd(rejected=0.05, soft_failed=0.05)), 120, seed=1, sign=False
    )
    await deliver(store, deliver_with_gap(room, 40, 60))
    stored = await store.events([event.event_id for event in room.events])
    return Delivered(room, room.room_id, list(stored))


async def test_windows_have_each_event_once_in_order(store: Store, delivered: Delivered) -> None:
    seen: list[lines.EventLine] = []
    place = lines.TOP
    while page := await ask(store, lines.window, delivered.room_id, place, limit=7):
        seen += page
        place = page[-1].position
    places = [line.position for line in seen]
    assert places == sorted(set(places), reverse=True)
    stored = await store.events(delivered.ids)
    assert {line.event_id for line in seen} == {
        one.event_id for one in stored.values() if not one.outlier
    }
    upwards: list[lines.EventLine] = []
    place = lines.BOTTOM
    while page := await ask(
        store, lines.window, delivered.room_id, place, direction="above", limit=11
    ):
        upwards = page + upwards
        place = page[0].position
    assert upwards == seen


async def test_a_line_says_what_the_store_says(store: Store, delivered: Delivered) -> None:
    found = await ask(store, lines.lines_by_id, delivered.ids)
    sizes = await ask(store, stored_sizes)
    stored = await store.events(delivered.ids, redact=False)
    assert found.keys() == stored.keys()
    gaps = await store.backward_extremities(delivered.room_id)
    nids = {line.event_nid: line.event_id for line in found.values()}
    for event_id, line in found.items():
        event = stored[event_id]
        assert (line.type, line.state_key, line.sender, line.depth, line.room_id) == (
            event.type,
            event.state_key,
            event.sender,
            event.depth,
            event.room_id,
        )
        assert (line.stream_ordering, line.topological_ordering) == (
            event.stream_ordering,
            event.topological_ordering,
        )
        assert (line.rejected, line.soft_failed, line.refused, line.outlier) == (
            event.rejected,
            event.soft_failed,
            event.refused,
            event.outlier,
        )
        assert line.is_redacted == (event.redacted_by is not None)
        assert line.stored_bytes == sizes[event_id]
        parents = set(delivered.room.event(event_id).prev_events)
        assert {nids[nid] for nid in line.prev_events if nid in nids} == parents & stored.keys()
        assert len(line.missing_parents) == len(parents & gaps)


async def test_merges_are_those_of_the_room(store: Store, delivered: Delivered) -> None:
    found = await ask(store, lines.merges, delivered.room_id)
    built = {event.event_id: event for event in delivered.room.events}
    stored = await store.events(delivered.ids)
    expected = [
        event_id
        for event_id, event in stored.items()
        if len(built[event_id].prev_events) > 1 and not event.outlier
    ]
    assert {merge.event_id for merge in found} == set(expected)
    for merge in found:
        parents = [one for one in built[merge.event_id].prev_events if one in stored]
        states = await store.states_after(parents)
        distinct = {frozenset(state.items()) for state in states.values()}
        assert merge.states == len(distinct)
        assert merge.parents == len(built[merge.event_id].prev_events)


async def test_edges_are_those_of_the_pdu(store: Store, delivered: Delivered) -> None:
    children: dict[str, set[str]] = {}
    stored = await store.events(delivered.ids)
    for event in delivered.room.events:
        for parent in event.prev_events:
            if event.event_id in stored and not stored[event.event_id].outlier:
                children.setdefault(parent, set()).add(event.event_id)
    for event_id in delivered.ids[::9]:
        found = await ask(store, lines.edges, event_id)
        json = stored[event_id].json
        assert [edge.event_id for edge in found.parents] == json["prev_events"]
        assert [edge.event_id for edge in found.auth_events] == json["auth_events"]
        assert {e.event_id for e in found.parents if e.is_stored} == stored.keys() & set(
            json["prev_events"]
        )
        assert set(found.children) == children.get(event_id, set())
        related = Counter(
            relation["rel_type"]
            for one in stored.values()
            if (relation := one.content.get("m.relates_to", {})).get("event_id") == event_id
            and "rel_type" in relation
        )
        assert set(related) <= {row.rel_type for row in found.related}


async def test_a_redaction_and_a_relation(store: Store) -> None:
    room = RoomBuilder("11", seed=2)
    room.start(ALICE)
    message = room.message(ALICE)
    for key in "ab":
        room.react(ALICE, message, key)
    room.edit(ALICE, message, "better")
    redaction = room.redact(ALICE, message)
    await store.append(room.pdus)
    found = await ask(store, lines.edges, message.event_id)
    assert found.related == [("m.annotation", 2), ("m.replace", 1)]
    assert found.redactions == [(redaction.event_id, True)]
    assert found.children


async def test_a_path_folds_to_the_state(store: Store, delivered: Delivered) -> None:
    for event_id in delivered.ids[::5]:
        groups = await ask(store, resolution.groups_of, event_id)
        assert groups is not None
        if groups.state_group_before is None:
            continue
        group = groups.state_group_before
        path = await ask(store, resolution.state_path, group)
        assert path[0].level is None
        levels = [step.level for step in path[1:]]
        assert levels == sorted(levels, key=lambda level: -(level or 0))
        assert path[-1].entry_count == len(await store.state_before(event_id))
        entries: dict[int, int] = {}
        async with store.database.connection() as conn:
            for step in path:
                own = dict(await conn.fetch(SQL_OWN, step.state_group, row=OwnEntryRow))
                assert step.entries == len(own)
                entries |= own
        assert sum(nid != REMOVED for nid in entries.values()) == path[-1].entry_count
    assert await ask(store, resolution.state_path, 2**40) == []
    assert await ask(store, resolution.groups_of, "$nothing") is None


async def test_the_history_of_a_key_ends_at_the_current_state(
    store: Store, delivered: Delivered
) -> None:
    changes = await ask(store, lines.key_history, delivered.room_id, limit=1_000)
    state: dict[tuple[str, str], str] = {}
    for change in reversed(changes):
        assert state.get((change.type, change.state_key)) == change.replaced
        if change.event_id is None:
            del state[change.type, change.state_key]
        else:
            state[change.type, change.state_key] = change.event_id
    assert state == await store.current_state(delivered.room_id)
    one = await ask(store, lines.key_history, delivered.room_id, "m.room.topic", "")
    assert one == [change for change in changes if change.type == "m.room.topic"]


async def test_a_topic_that_went_back(store: Store) -> None:
    """A ban that arrives late takes the topic of the banned user with it."""
    room = RoomBuilder("11", seed=3, checked=False)
    mod = UserId(f"@mod:{SERVER}")
    room.start(ALICE, users={ALICE: 100, mod: 50})
    room.join(mod)
    first = room.topic(ALICE, "first")
    left, right = room.fork(2)
    second = left.topic(mod, "second")
    ban = right.ban(ALICE, mod)
    for event in room.events:
        await store.append([event.pdu])
    changes = await ask(store, lines.key_history, room.room_id, "m.room.topic", "")
    assert [
        (one.event_id, one.replaced, one.caused_by, one.is_by_resolution) for one in changes
    ] == [
        (first.event_id, second.event_id, ban.event_id, True),
        (second.event_id, first.event_id, second.event_id, False),
        (first.event_id, None, first.event_id, False),
    ]


async def test_readers_are_those_of_the_table(store: Store, delivered: Delivered) -> None:
    local = {
        event.state_key
        for event in delivered.room.events
        if event.type == "m.room.member" and str(event.state_key).endswith(f":{SERVER}")
    }
    for event_id in delivered.ids[::11]:
        found = await ask(store, lines.readers, event_id)
        assert {row.user_id for row in found} <= local
        for user_id, is_visible in found:
            assert is_visible == (event_id in await store.visible_to_user(user_id, [event_id]))


async def test_audience_ranges_cover_what_is_visible(store: Store, delivered: Delivered) -> None:
    async with store.database.connection() as conn:
        numbers = dict(
            await conn.fetch(
                "SELECT event_id, audience FROM events WHERE audience IS NOT NULL",
                row=EventAudienceRow,
            )
        )
    user = next(e.sender for e in delivered.room.events if e.sender.endswith(f":{SERVER}"))
    found = await ask(store, lines.audience_ranges, user, [delivered.room_id])
    assert found
    assert all(row.room_id == delivered.room_id for row in found)
    ranges = [(row.first_audience or 0, row.end_audience or 2**63) for row in found]
    assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
    stored = await store.events(delivered.ids)
    shown = [e for e in stored.values() if e.event_id in numbers and not e.rejected]
    own = {
        one.event_id
        for one in shown
        if any(first <= numbers[one.event_id] < end for first, end in ranges)
        and not one.soft_failed
    }
    visible = await store.visible_to_user(user, own)
    ineffective = own - visible  # redactions without effect
    assert len(ineffective) < len(own) / 10
    for row in found:
        first, end = row.first_topological or 0, row.end_topological or 2**63
        assert first < end


async def test_lists_of_rooms(store: Store) -> None:
    rooms = []
    for seed in range(4):
        room = RoomBuilder("11", seed=seed)
        room.start(ALICE)
        for number in range(seed):
            room.join(f"@user{number}:{SERVER}")
        await store.append(room.pdus)
        rooms.append(room)
    ids = [room.room_id for room in rooms]
    recent = await ask(store, room_lists.recent_rooms)
    assert [one.room_id for one in recent] == ids[::-1]
    named = await ask(store, room_lists.rooms_after, limit=2)
    assert [one.room_id for one in named] == sorted(ids)[:2]
    rest = await ask(store, room_lists.rooms_after, named[-1].room_id)
    assert [one.room_id for one in rest] == sorted(ids)[2:]
    for size in ("members", "depth"):
        large = await ask(store, room_lists.largest_rooms, size, limit=2)
        assert [one.room_id for one in large] == ids[:1:-1]
    given = await ask(store, room_lists.rooms_by_id, [ids[2], RoomId("!no")])
    [one] = given
    info = (await store.rooms([ids[2]]))[ids[2]]
    assert (one.room_version, one.joined_count, one.invited_count) == (
        info.version,
        info.joined_count,
        info.invited_count,
    )
    assert one.extremities == len(await store.forward_extremities(ids[2]))
    assert (one.gaps, one.is_partial) == (0, False)
    assert (one.events, one.is_exact) == (len(rooms[2].events), True)
    assert one.last_received_ts is not None
    assert abs(one.last_received_ts - time.time() * 1000) < 600_000


async def test_large_rooms_are_estimated(
    store: Store, delivered: Delivered, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(room_lists, "ROOMS_COUNTED_MAX", 10)
    async with store.database.connection() as conn:
        await conn.execute("ANALYZE events")
    [one] = await ask(store, room_lists.rooms_by_id, [delivered.room_id])
    assert not one.is_exact
    assert one.events == pytest.approx(len(delivered.ids), rel=0.1)
    assert one.gaps <= 10


async def test_growth_counts_what_arrived(store: Store, delivered: Delivered) -> None:
    now = time.time_ns() // 1_000_000
    first, middle, end = await ask(
        store, growth.positions_at, [0, now - growth.DAY_MS, now + growth.DAY_MS]
    )
    stored = await store.events(delivered.ids)
    positions = sorted(e.stream_ordering for e in stored.values() if e.stream_ordering)
    assert (first, middle, end) == (positions[0], positions[0], positions[-1] + 1)
    exact = await ask(store, growth.room_growth, first, end)
    assert exact.is_exact
    [row] = exact.rooms
    assert row.events == len(positions)
    sizes = await ask(store, stored_sizes)
    assert row.stored_bytes == sum(sizes[i] for i, e in stored.items() if e.stream_ordering)
    sampled = await ask(store, growth.room_growth, first, end, samples=len(positions) // 2)
    assert not sampled.is_exact
    assert sampled.rooms[0].events == pytest.approx(row.events, rel=0.2)
    live = sum(1 for e in delivered.room.events if e.event_id in stored) - sum(
        1 for e in stored.values() if e.outlier
    )
    weeks = await ask(store, growth.room_weeks, delivered.room_id, [first, middle, end])
    assert weeks[0] == weeks[2] == 0  # the boundaries are equal, and nothing is after the end
    assert weeks[1] is not None
    assert 0 < weeks[1] <= live
    cut = await ask(
        store, growth.room_weeks, delivered.room_id, [first, positions[30], positions[-5]], limit=10
    )
    assert cut[:2] == [None, None]
    assert cut[2] is not None


async def test_positions_of_an_empty_database(store: Store) -> None:
    assert await ask(store, growth.positions_at, [0, 2**62]) == [1, 1]
    nothing = await ask(store, growth.room_growth, 1, 1)
    assert nothing == (0, True, [])


@pytest.mark.parametrize("days", range(0, 30, 7))
async def test_a_position_is_the_first_of_its_time(store: Store, days: int) -> None:
    room = RoomBuilder("11", seed=4)
    room.start(ALICE)
    for _ in range(60):
        room.message(ALICE)
    await store.append(room.pdus)
    day = growth.DAY_MS
    async with store.database.connection() as conn:
        await conn.execute("UPDATE events SET received_ts = stream_ordering / 3 * $1::bigint", day)
        rows = await conn.fetch(
            "SELECT stream_ordering, received_ts FROM events ORDER BY 1", row=EventArrivalRow
        )
    [found] = await ask(store, growth.positions_at, [days * day])
    expected = next((position for position, ts in rows if ts >= days * day), rows[-1][0] + 1)
    assert abs(found - expected) <= 8  # events are looked at eight at a time
    assert found <= expected


@pytest.mark.parametrize("clock", [0, 2**50])
@pytest.mark.parametrize("wrong", [range(10, 18), range(40, 41), range(5, 60, 7)])
async def test_a_wrong_clock_moves_no_position(store: Store, wrong: range, clock: int) -> None:
    """An event a day; some of them were received when the clock said 1970, or years ahead."""
    room = RoomBuilder("11", seed=4)
    room.start(ALICE)
    for _ in range(60):
        room.message(ALICE)
    await store.append(room.pdus)
    async with store.database.connection() as conn:
        positions: list[int] = await conn.fetchvals("SELECT stream_ordering FROM events ORDER BY 1")
        first = positions[0]
        await conn.execute(
            "UPDATE events SET received_ts = CASE"
            " WHEN stream_ordering - $1::bigint = ANY($2::int[]) THEN $3::bigint"
            " ELSE (stream_ordering - $1::bigint) * $4::bigint END",
            first,
            list(wrong),
            clock,
            growth.DAY_MS,
        )
    right = [position for position in positions if position - first not in wrong]
    after = [position + 1 for position in positions if position - first in wrong]
    wanted = [position for position in right if position not in after]
    found = await ask(
        store, growth.positions_at, [(position - first) * growth.DAY_MS for position in wanted]
    )
    assert found == wanted


async def test_search(store: Store) -> None:
    room = RoomBuilder("11", seed=5)
    room.start(ALICE)
    room.join("@remote:s2.test")
    alias = room.state_event(
        ALICE,
        "m.room.canonical_alias",
        {"alias": "#pantry:s1.test", "alt_aliases": ["#käse:s1.test"]},
    )
    other = RoomBuilder("11", seed=6)
    other.start(ALICE)
    other.state_event(ALICE, "m.room.canonical_alias", {"alias": "#pantry:s1.test.other"})
    await store.append(room.pdus)
    await store.append(other.pdus)
    assert await ask(store, search.events_called, alias.event_id) == [alias.event_id]
    assert await ask(store, search.events_called, alias.event_id[:-1]) == []
    assert await ask(store, search.rooms_like, "!room") == [
        room.room_id,
        other.room_id,
    ]
    assert await ask(store, search.users_like, "@re") == ["@remote:s2.test"]
    assert await ask(store, search.users_like, "") == [ALICE, "@remote:s2.test"]
    for text in ("#pantry:s1.test", "#käse:s1.test"):
        assert await ask(store, search.rooms_by_alias, text) == [room.room_id]
    assert await ask(store, search.rooms_by_alias, "#pantry") == []


async def test_writers_and_activity(store: Store, dsn: str) -> None:
    room = RoomBuilder("11", seed=7)
    room.start(ALICE)
    await store.append(room.pdus)
    found = await ask(store, writers.writers)
    mine = {row.stream_name: row for row in found if row.instance_name == store.instance_name}
    assert mine.keys() == set(store.streams)
    for name, row in mine.items():
        assert row.is_live
        assert row.stream_id >= store.streams[name].positions()[store.instance_name]
        assert row.behind == 0
    async with storage.open(dsn, server_name=SERVER, instance_name="other"):
        pass
    found = await ask(store, writers.writers)
    assert {row.is_live for row in found if row.instance_name == "other"} == {False}
    assert await ask(store, writers.purged_streams) == []
    assert await ask(store, writers.lost_ranges) == []
    async with store.database.transaction() as conn:
        await conn.fetchval("SELECT 1")
        [idle] = [one for one in await ask(store, running) if one.query == "SELECT 1"]
        assert idle.state == "idle in transaction"
        assert idle.running_ms >= 0
