"""Verdicts of the caller are kept by export, import, rebuild and repair."""

import random
from collections.abc import AsyncIterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import storage
from storage import Store
from storage.database.arrow_results import arrow_snapshot
from storage.errors import InvalidEvent
from storage.event.ndjson import envelope, read_line
from storage.ids import EventId
from storage.importing.reading import Rejects
from storage.importing.run import Import
from storage.maintenance.archive import archive, rooms_to_archive
from storage.pipeline.imports.lines import parse_line, parse_row
from storage.pipeline.source.rows import COLUMNS, read_rows
from storage.rebuild import Rebuilder, rebuild
from storage.testing import RoomBuilder, build_room
from storage.testing.world import ALL_ACTIONS, Odd, Shape
from tests.maintenance.rooms import SERVER, findings
from tests.pipeline.stores import tables

SHAPE = Shape("verdicts", mix=ALL_ACTIONS, members=6, fork_rate=0.1, odd=Odd(early_redaction=0.03))
REASON = "policy"


async def fill_with_verdicts(store: Store, seed: int) -> RoomBuilder:
    """Append a room in parts; a fifth of it is refused, half of that readmitted in between."""
    room = build_room(SHAPE, 150, seed=seed, sign=False)
    async for _ in parts_with_verdicts(store, room, seed):
        pass
    return room


async def parts_with_verdicts(store: Store, room: RoomBuilder, seed: int) -> AsyncIterator[int]:
    """Do so, and yield after each part."""
    rng = random.Random(seed)
    wanted = {one.event_id: REASON for one in rng.sample(room.events[8:], 30)}
    refused: list[EventId] = []
    readmitted = 0
    for start in range(0, len(room.events), 15):
        part = room.events[start : start + 15]
        verdicts = {one.event_id: REASON for one in part if one.event_id in wanted}
        results = await store.append(
            [one.pdu for one in part], room_version=room.version, refused=verdicts
        )
        refused += [one.event_id for one in results if one.event_id and one.reason == REASON]
        for event_id in rng.sample(refused, len(refused) // 3):
            assert (await store.readmit(event_id)).outcome in {"stored", "redacted"}
            refused.remove(event_id)
            readmitted += 1
        yield start
    assert refused
    assert readmitted > 5


async def exported(store: Store, path: Path) -> None:
    async with store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        lines = [
            line
            for room in await rooms_to_archive(conn)
            async for page in archive(conn, room)
            for line in page
        ]
    path.write_bytes(b"".join(line + b"\n" for line in lines))


@pytest.mark.parametrize("seed", range(3))
async def test_an_import_of_an_export_has_the_same_verdicts(
    dsn: str, another_dsn: str, tmp_path: Path, seed: int
) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        await fill_with_verdicts(store, seed)
        assert await findings(store) == []
        await exported(store, tmp_path / "rooms.ndjson")
    async with storage.open(another_dsn, server_name=SERVER) as copy:
        for _ in range(2):  # the second time all is there already
            run = Import(copy, Rejects(None))
            summary = await run.run([str(tmp_path / "rooms.ndjson")])
            assert not summary.outcomes.keys() & {"bad_line", "invalid", "missing_parents"}
        assert await findings(copy) == []
    expected, found = await tables(dsn), await tables(another_dsn)
    for one in (expected, found):
        del one["counts"]["state_groups"], one["counts"]["audiences"]
    assert found == expected


@pytest.mark.parametrize("seed", range(3))
async def test_a_rebuild_keeps_verdicts(dsn: str, seed: int) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        room = await fill_with_verdicts(store, seed)
        before = await tables(dsn)
        async with Rebuilder.opened(dsn, SERVER) as rebuilder:
            assert (await rebuilder.rebuild(room.room_id)).events == 0
        assert await tables(dsn) == before
        async with store.database.connection() as conn:
            await conn.execute("UPDATE events SET superseded = NULL, redacted_by = NULL")
        assert await findings(store) != []
        async with Rebuilder.opened(dsn, SERVER) as rebuilder:
            assert (await rebuilder.rebuild(room.room_id)).events > 0
        assert await tables(dsn) == before
        assert await findings(store) == []


async def test_an_import_of_parquet_refuses_and_readmits(
    dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    """The rows are in the order of the file, so a readmitted event is refused just before that."""
    async with storage.open(dsn, server_name=SERVER) as store:
        await fill_with_verdicts(store, 1)
        expected = await flags(store)
    with arrow_snapshot(dsn) as conn:
        nids = [row["event_nid"] for row in conn.rows("SELECT event_nid FROM events")]
        batches = list(read_rows(conn, nids, COLUMNS))
    pq.write_table(pa.Table.from_batches(batches), tmp_path / "rooms.parquet")
    async with storage.open(another_dsn, server_name=SERVER) as copy:
        summary = await Import(copy, Rejects(None)).run([str(tmp_path / "rooms.parquet")])
        assert not summary.outcomes.keys() & {"bad_line", "invalid", "missing_parents"}
        assert await findings(copy) == []
        assert await flags(copy) == expected


async def flags(store: Store) -> dict[str, tuple[bool, str | None]]:
    """Whether each event was readmitted, and the verdict on it."""
    async with store.database.connection() as conn:
        rows = await conn._driver.fetch(
            "SELECT event_id, arrival_ordering IS NOT NULL, refused FROM events"
        )
    return {event_id: (was_refused, refused) for event_id, was_refused, refused in rows}


async def test_a_repair_keeps_verdicts(dsn: str) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        room = await fill_with_verdicts(store, 1)
        before = await tables(dsn)
        async with store.database.connection() as conn:
            await conn.execute(
                "UPDATE events SET superseded = CASE WHEN superseded THEN NULL ELSE true END"
                " WHERE refused IS NOT NULL"
            )
        assert {one.check for one in await findings(store)} == {"superseded"}
        await rebuild(store.database, room.room_id, server_name=SERVER)
        assert await findings(store) == []
        assert (await tables(dsn))["events"] == before["events"]


def test_a_line_has_a_verdict_or_a_readmission() -> None:
    said = envelope(b'{"sender":"@a:b"}', "11", "live", refused="spam")
    assert read_line(said).refused == "spam"
    assert parse_line(said).refused == "spam"
    assert parse_row({"pdu": b"{}", "refused": "spam"}).refused == "spam"
    again = envelope(b'{"sender":"@a:b"}', "11", "live", readmit=True)
    assert read_line(again).readmit
    assert parse_line(again).readmit


def test_a_row_of_a_readmitted_event_has_two_steps() -> None:
    row = {"pdu": b"{}", "stream_ordering": 20, "arrival_ordering": 5}
    (first, arrival), (second, again) = parse_row(row).steps(20)
    assert (first, arrival.refused, arrival.readmit) == (5, "readmitted later", False)
    assert (second, again.refused, again.readmit) == (20, None, True)
    [(rank, only)] = parse_row(row | {"arrival_ordering": None}).steps(20)
    assert (rank, only.refused, only.readmit) == (20, None, False)
    without = {"pdu": b"{}", "arrival_ordering": 5}  # no position to order it by
    assert len(parse_row(without).steps(1)) == 1


@pytest.mark.parametrize(
    "member, said",
    [(b'"refused":5', "not a string"), (b'"readmit":"yes"', "neither true nor false")],
)
def test_a_malformed_verdict_of_a_line_is_named(member: bytes, said: str) -> None:
    with pytest.raises(InvalidEvent, match=said):
        read_line(b'{"pdu":{},"room_version":"11",' + member + b"}")


def test_an_import_by_spark_checks_the_reason() -> None:
    with pytest.raises(InvalidEvent, match="500"):
        parse_row({"pdu": b"{}", "refused": "s" * 501})
