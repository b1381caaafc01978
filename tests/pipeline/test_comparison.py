"""A comparison finds what differs between the mirror's `events` and the store, piece by piece."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

import storage
from storage.database.arrow_results import arrow_snapshot
from storage.ids import UserId
from storage.maintenance.purge import purge_room
from storage.pipeline import mirror
from storage.pipeline.lake import bulk, delta_table, event_pass, event_rows
from storage.pipeline.lake.bulk import MirrorChanges, compare_all, compare_rooms
from storage.pipeline.lake.delta_table import LakeTable, MirrorState
from storage.pipeline.lake.room_rows import RoomSums
from storage.pipeline.lake.tables import (
    EVENTS,
    MEMBERSHIPS,
    ROOMS,
    STATE_CHANGES,
    VISIBILITY,
    current_position,
)
from storage.pipeline.source.token_bounds import between, deployment_of
from storage.streams import SyncToken
from storage.testing import SHAPES, RoomBuilder, generate_room
from tests.long_run import long_run
from tests.pipeline.mirrored import differences
from tests.pipeline.stores import SERVER, fill

pytestmark = pytest.mark.timeout(300)

PIECE = 7
ELSEWHERE = 10**12
"""A position that the store does not have."""


async def filled(dsn: str) -> None:
    """Three rooms; events of one were refused, and some of these readmitted much later."""
    room = RoomBuilder("11", seed=3, sign=False, servers=[SERVER])
    room.start(room.user(1))
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus)
        sent = [room.message(room.user(1), f"{number}") for number in range(12)]
        refused = {event.event_id: "spam" for event in sent[::2]}
        await store.append([event.pdu for event in sent], refused=refused)
        readmitted = list(refused)[:4]
    for seed in range(2):
        await fill(dsn, generate_room(SHAPES["small_chat"], 40, seed=seed, sign=False))
    async with storage.open(dsn, server_name=SERVER) as store:
        for event_id in readmitted:
            assert (await store.readmit(event_id)).outcome == "stored"


def events_of(folder: Path, dsn: str) -> LakeTable:
    with arrow_snapshot(dsn) as conn:
        return LakeTable.open(str(folder), EVENTS, deployment_of(conn), 1)


def damage(lake: LakeTable, rng: random.Random) -> None:
    """Rows go, differ, and come from nowhere, in files whose ranges overlap."""
    table = lake.rows(EVENTS.schema.names)
    state = lake.state()
    assert state is not None
    gone = table.column("arrived").to_pylist()
    table = table.filter(pa.array([rng.random() < 0.8 for _ in gone]))
    digests = [digest + (rng.random() < 0.2) for digest in table.column("digest").to_pylist()]
    table = table.set_column(EVENTS.schema.get_field_index("digest"), "digest", pa.array(digests))
    strange = table.slice(0, 5)
    positions = pa.array([-3, -2, *range(ELSEWHERE, ELSEWHERE + 3)], pa.int64())
    table = pa.concat_tables([table, strange.set_column(0, "arrived", positions)])
    lake.commit(
        [table.take(list(range(part, table.num_rows, 3))) for part in range(3)], state, gone
    )


def expected(
    stored: list[dict[str, Any]], ours: list[dict[str, Any]], rooms: set[int] | None = None
) -> MirrorChanges:
    """The same by dictionaries of all events."""
    chosen = [row for row in stored if rooms is None or row["room_nid"] in rooms]
    known = {
        row["arrived"]: row["digest"] for row in ours if rooms is None or row["room_nid"] in rooms
    }
    found = MirrorChanges()
    for row in chosen:
        if known.pop(row["arrived"], None) != row["digest"]:
            found.deleted.add(row["arrived"])
            found.again.add(row["event_nid"])
    found.deleted.update(known)
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=long_run) for n in range(1, 6))])
async def test_what_differs_is_found(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(bulk, "PIECE", PIECE + seed)
    monkeypatch.setattr(event_rows, "ROOMS_PER_STATEMENT", 1 + seed)
    await filled(dsn)
    mirror(None, dsn, str(tmp_path), once=True)
    lake = events_of(tmp_path, dsn)
    stored = lake.rows(EVENTS.schema.names).to_pylist()
    moved = [row for row in stored if row["arrived"] != row["stream_ordering"]]
    assert len(moved) == 4
    damage(lake, random.Random(seed))
    ours = lake.rows(EVENTS.schema.names).to_pylist()
    rooms = {row["room_nid"] for row in stored}
    with arrow_snapshot(dsn) as conn:
        covered = between(conn, SyncToken(), current_position(conn))
        assert compare_all(conn, lake, covered) == expected(stored, ours)
        for some in (rooms, set(list(rooms)[:1]), set[int](), {*rooms, 10**6}):
            assert compare_rooms(conn, lake, some, covered) == expected(stored, ours, some)
        nothing = between(conn, SyncToken(), SyncToken())
        assert compare_all(conn, lake, nothing) == expected([], ours)
    mirror(None, dsn, str(tmp_path), once=True, compare=True)
    assert await differences(dsn, tmp_path) == {}


async def test_an_equal_mirror_has_no_difference(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No piece is large, however many events there are."""
    sizes: list[int] = []
    differing = bulk._differing

    def measured(stored: pa.Table, ours: pa.Table) -> pa.Table:
        sizes.extend([stored.num_rows, ours.num_rows])
        return differing(stored, ours)

    monkeypatch.setattr(bulk, "PIECE", PIECE)
    monkeypatch.setattr(bulk, "_differing", measured)
    await filled(dsn)
    mirror(None, dsn, str(tmp_path), once=True)
    lake = events_of(tmp_path, dsn)
    with arrow_snapshot(dsn) as conn:
        covered = between(conn, SyncToken(), current_position(conn))
        assert compare_all(conn, lake, covered) == MirrorChanges()
    assert max(sizes) <= PIECE + 4  # readmitted events are compared once more
    assert sum(sizes) >= 2 * lake.rows(["arrived"]).num_rows


@pytest.mark.parametrize("many", [0, 20_000])
async def test_gone_and_changed_rooms_are_compared(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    """After a purge: the changed rooms, or all events where the rooms are too many."""
    monkeypatch.setattr(event_pass, "MANY_ROOMS", many)
    monkeypatch.setattr(bulk, "PIECE", PIECE)
    monkeypatch.setattr(bulk, "SWEPT_PIECE", 2)
    await filled(dsn)
    mirror(None, dsn, str(tmp_path), once=True)
    lake = events_of(tmp_path, dsn)
    room_id = pc.unique(lake.rows(["room_id"]).column(0)).to_pylist()[1]
    before = lake.rows(["arrived"]).num_rows
    async with storage.open(dsn, server_name=SERVER) as store:
        await purge_room(store.database, room_id, server_name=SERVER, force=True)
        with arrow_snapshot(dsn) as conn:
            tables = [
                LakeTable.open(str(tmp_path), table, deployment_of(conn), 1)
                for table in (EVENTS, STATE_CHANGES, MEMBERSHIPS, VISIBILITY, ROOMS)
            ]
            for table in tables:
                assert len(bulk.deleted_rooms(conn, table)) == 1, table.table.name
        mirror(None, dsn, str(tmp_path), once=True)
        assert await differences(dsn, tmp_path) == {}
    assert events_of(tmp_path, dsn).rows(["arrived"]).num_rows < before


def test_rows_are_chosen_by_key(tmp_path: Path) -> None:
    lake = LakeTable.open(str(tmp_path), ROOMS, "here", 1)
    state = MirrorState("s1")
    rng = np.random.default_rng(1)
    numbers = rng.permutation(200)
    for some in np.split(numbers, [10, 60, 61, 150]):
        columns = {field.name: pa.nulls(len(some), field.type) for field in ROOMS.schema}
        columns["room_nid"] = pa.array(some, pa.int64())
        lake.commit([pa.table(columns, schema=ROOMS.schema)], state)
    for first, last in ((0, 199), (20, 20), (50, 120), (-5, 3), (190, 10**9), (300, 400), (9, 3)):
        found = lake.within(["room_nid"], first, last).column(0).to_pylist()
        assert sorted(found) == [one for one in range(200) if first <= one <= last]
        keys = {*range(first, min(last, 199) + 1, 3), -7}
        found = lake.rows(["room_nid"], keys).column(0).to_pylist()
        assert sorted(found) == sorted(keys & set(range(200)))
    assert lake.rows(["room_nid"], np.array([5, 5, 1])).num_rows == 2


@pytest.mark.parametrize("together", [1, 2_000])
async def test_a_comparison_mends_the_other_tables(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    """One pass over the files finds the same as a comparison of their rows."""
    monkeypatch.setattr(event_pass, "TOGETHER", together)
    await filled(dsn)
    mirror(None, dsn, str(tmp_path), once=True)
    rng = random.Random(1)
    for table in (STATE_CHANGES, MEMBERSHIPS, VISIBILITY):
        with arrow_snapshot(dsn) as conn:
            lake = LakeTable.open(str(tmp_path), table, deployment_of(conn), 1)
        rows, state = lake.rows(table.schema.names), lake.state()
        assert state is not None
        numbers = rows.column("room_nid")
        kept = rows.filter(pa.array([rng.random() < 0.9 for _ in numbers]))
        strange = rows.slice(0, 3).set_column(0, "room_nid", pa.array([-1, 10**6, 10**6]))
        lake.commit([kept, strange, rows.slice(0, 1)], state, numbers.to_pylist())
    mirror(None, dsn, str(tmp_path), once=True, compare=True)
    assert await differences(dsn, tmp_path) == {}
    replaced: list[int] = []
    mirror(
        None,
        dsn,
        str(tmp_path),
        once=True,
        compare=True,
        report=lambda made: replaced.append(made.rows + made.replaced),
    )
    assert replaced == [0] * 5


def test_sums_differ_where_rows_do() -> None:
    """Of every two rooms with few rows: nulls, empty texts and texts that look like others."""
    schema = pa.schema([("room_nid", pa.int64()), ("a", pa.string()), ("b", pa.int64())])
    values = [(a, b) for a in (None, "", "-", "=", "-\x01") for b in (None, 0, -1, -2, 2**62)]
    rooms = [[], *([one] for one in values), *([one, two] for one in values for two in values[:4])]

    def table(number: int, rows: list[Any]) -> pa.Table:
        return pa.Table.from_pylist(
            [{"room_nid": number, "a": a, "b": b} for a, b in rows], schema=schema
        )

    ours = RoomSums.of(7, 7 + len(rooms), [table(7 + at, rows) for at, rows in enumerate(rooms)])
    for other in rooms:
        wanted = {7 + at for at, rows in enumerate(rooms) if Counter(rows) != Counter(other)}
        theirs = pa.concat_tables([table(7 + at, other[::-1]) for at in range(len(rooms))])
        assert ours.differing(list(range(7, 7 + len(rooms))), theirs) == wanted
    assert ours.differing([], schema.empty_table()) == set()


async def test_an_erasure_reaches_every_part_of_a_file(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delta_table, "PART_ROWS", 4)
    await filled(dsn)
    mirror(None, dsn, str(tmp_path), once=True)
    senders = Counter(events_of(tmp_path, dsn).rows(["sender"]).column("sender").to_pylist())
    [(most, count)] = senders.most_common(1)
    assert count > 2 * delta_table.PART_ROWS
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.erase_user(UserId(most))
    mirror(None, dsn, str(tmp_path), once=True)
    rows = events_of(tmp_path, dsn).rows(["sender", "erased"]).to_pylist()
    assert all(row["erased"] is (row["sender"] == most) for row in rows)
