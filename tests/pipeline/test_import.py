"""Importing through Spark gives the same tables as appending event by event.

They are equal row for row, with numbers and positions mapped.
"""

import asyncio
import json
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import asyncpg
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from pyspark.sql import SparkSession

import storage
from storage.errors import InputError
from storage.pipeline import import_archive, verify
from storage.pipeline.imports.dead_letters import refuse_others
from storage.pipeline.imports.run import assign_rooms
from storage.pipeline.imports.stage import staging
from storage.testing import (
    ODD_SOME,
    SHAPES,
    GeneratedEvent,
    GeneratedRoom,
    RoomBuilder,
    build_room,
    deliver_late,
    deliver_shuffled,
    deliver_with_gap,
    generate_room,
    write_ndjson,
)
from tests.conftest import _fresh_database
from tests.database.test_roles import Logins, logins
from tests.pipeline.planted import with_planted_creates
from tests.pipeline.stores import SERVER, large_tables, tables

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]
__all__ = ["logins"]  # a fixture
EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "2"))
ROOMS_EACH = 5
"""Rooms of one example: a job costs seconds however few events there are."""


async def append_patiently(dsn: str, events: Sequence[GeneratedEvent]) -> None:
    """One by one; again and again the first that does not lack anything.

    The naive form of `storage.pipeline.imports.lines`.
    """
    async with storage.open(dsn, server_name=SERVER) as store:
        waiting = list(events)
        while waiting:
            for index, event in enumerate(waiting):
                given = {} if event.state_before is None else {event.event_id: event.state_before}
                [result] = await store.append(
                    [event.pdu],
                    room_version=event.room_version,
                    origin=event.origin,
                    state_before=given,
                    room_versions={event.room_id: event.room_version},
                )
                if result.outcome != "missing_parents":
                    del waiting[index]
                    break
            else:
                return


def interleaved(rooms: Iterable[GeneratedRoom]) -> list[GeneratedEvent]:
    """The rooms' events by turns, as they come over the day."""
    lanes = [list(room) for room in rooms]
    longest = max(map(len, lanes))
    return [lane[at] for at in range(longest) for lane in lanes if at < len(lane)]


class Recipe(NamedTuple):
    """A room, and how it comes."""

    shape: str
    version: str
    size: int
    seed: int
    way: str
    begin: float
    end: float

    def delivery(self) -> GeneratedRoom:
        shape = SHAPES[self.shape]
        if self.way in {"in order", "odd"}:
            odd = shape if self.way == "in order" else shape.replaced(odd=ODD_SOME)
            return generate_room(odd, self.size, seed=self.seed, version=self.version, sign=False)
        room = build_room(shape, self.size, seed=self.seed, version=self.version, sign=False)
        match self.way:
            case "planted":
                in_order = generate_room(
                    shape, self.size, seed=self.seed, version=self.version, sign=False
                )
                return with_planted_creates(in_order, at=1)
            case "late":
                return deliver_late(room, self.seed)
            case "gap":
                begin, end = sorted(
                    1 + int(part * (len(room.events) - 1)) for part in (self.begin, self.end)
                )
                return deliver_with_gap(room, begin, end)
            case _:
                return deliver_shuffled(room, self.seed)


WAYS = ["in order", "odd", "late", "gap", "shuffled", "planted"]
RECIPES = st.builds(
    Recipe,
    st.sampled_from(["small_chat", "direct_chat", "join_leave_storm", "fork_heavy"]),
    st.sampled_from(["1", "3", "6", "8", "10", "11", "12"]),
    st.integers(12, 50),
    st.integers(0, 10_000),
    st.sampled_from(WAYS),
    st.floats(0, 1),
    st.floats(0, 1),
)


def test_the_same_tables_row_for_row(
    spark: SparkSession, server_dsn: str, template_name: str, worker_id: str, tmp_path: Path
) -> None:
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize="STORAGE_EXAMPLES" not in os.environ,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(
        st.lists(
            RECIPES, min_size=ROOMS_EACH, max_size=ROOMS_EACH, unique_by=lambda recipe: recipe.seed
        ),
        st.sampled_from([1, 7, 30, 5000]),
    )
    @example(
        [Recipe("fork_heavy", "11", 50, seed, way, 0.2, 0.7) for seed, way in enumerate(WAYS)], 1
    )
    def holds(recipes: list[Recipe], part: int) -> None:
        events = interleaved(recipe.delivery() for recipe in recipes)
        write_ndjson(events, tmp_path / "rooms.ndjson")
        asyncio.run(compare(events, part))

    async def compare(events: list[GeneratedEvent], part: int) -> None:
        async with (
            _fresh_database(server_dsn, template_name, worker_id) as appended,
            _fresh_database(server_dsn, template_name, worker_id) as imported,
        ):
            await append_patiently(appended, events)
            import_archive(
                spark,
                [str(tmp_path / "rooms.ndjson")],
                imported,
                server_name=SERVER,
                work=str(tmp_path / "work"),
                part=part,
            )
            assert await tables(imported) == await tables(appended)

    holds()


@pytest.mark.timeout(3600)
async def test_one_large_room_gives_the_same_tables(
    spark: SparkSession, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    """Written in parts.

    `STORAGE_LARGE_ROOM=200000` says how large; without it a small large room.
    """
    size = int(os.environ.get("STORAGE_LARGE_ROOM", "1500"))
    room = generate_room(SHAPES["small_chat"], size, seed=8, sign=False)
    write_ndjson(room, tmp_path / "room.ndjson")
    async with storage.open(another_dsn, server_name=SERVER) as store:
        for begin in range(0, len(room), 1000):
            await store.append(room.pdus[begin : begin + 1000], room_version=room.room_version)
    summary = import_archive(
        spark, [str(tmp_path / "room.ndjson")], dsn, server_name=SERVER, part=max(size // 20, 100)
    )
    assert summary.outcomes["stored"] == size
    if size > 5_000:
        assert await large_tables(dsn) == await large_tables(another_dsn)
        assert verify(spark, dsn).count() == 0
    else:
        assert await tables(dsn) == await tables(another_dsn)


def test_a_folder_of_other_files_takes_no_rejects(spark: SparkSession, tmp_path: Path) -> None:
    """They would be deleted. Files of earlier imports, also by Hadoop, are replaced."""
    ours = ("part-00000.parquet", ".part-00000.parquet.crc", "_SUCCESS", f"_{'0a' * 8}.parquet")
    for name in ours:
        (tmp_path / name).touch()
    refuse_others(str(tmp_path))
    refuse_others(str(tmp_path / "absent"))
    for foreign in ("room.ndjson", "_notes.txt", "part-1.txt", "folder/x"):
        path = tmp_path / foreign
        path.parent.mkdir(exist_ok=True)
        path.touch()
        with pytest.raises(
            InputError, match=f"{foreign.split('/')[0]}, which is not from an import"
        ):
            # before anything else: there is no such database
            import_archive(spark, [str(tmp_path)], "postgresql://", rejects=str(tmp_path))
        path.unlink()
    assert {one.name for one in tmp_path.iterdir()} == {*ours, "folder"}


async def test_rejects_stand_with_their_lines(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    room = generate_room(SHAPES["small_chat"], 12)
    events = list(room)
    keys = room.keys
    archive = tmp_path / "room.ndjson"
    write_ndjson(events[:8], archive)
    with archive.open("ab") as file:
        file.write(b"\nnot json\n")
        file.write(b'{"pdu": {"room_id": "!x:y"}, "room_version": "99"}\n')
        file.write(
            b'{"pdu": '
            + events[8].pdu.replace(b'"origin_server_ts":', b'"origin_server_ts":1')
            + b', "room_version": "11"}\n'
        )
        write_ndjson(events[10:11], file)
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    paths = [str(archive), str(tmp_path / "broken.parquet")]
    summary = import_archive(
        spark,
        paths,
        dsn,
        server_name=SERVER,
        verify_keys=keys,
        rejects=str(tmp_path / "dead"),
        writers=1,
    )
    dead = spark.read.parquet(str(tmp_path / "dead")).orderBy("line").collect()
    assert summary.outcomes["stored"] == 8
    assert summary.outcomes["bad_file"] == 1
    told = {row.line: (row.outcome, row.reason) for row in dead}
    assert told[10][0] == "bad_line"
    assert "99" in told[11][1]
    assert "signature" in told[12][1]
    assert told[13][0] == "missing_parents"
    assert summary.rejects == 5
    again = import_archive(spark, paths, dsn, server_name=SERVER, verify_keys=keys, writers=1)
    assert again.outcomes["duplicate"] == 8


def test_stray_keys_of_old_servers_are_counted(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    room = RoomBuilder("5", sign=False)
    room.start("@user1:s1.test")
    room.message("@user1:s1.test", "hello")
    *others, last = (dict(one.json) for one in room.events)
    path = tmp_path / "room.ndjson"
    path.write_text("\n".join(map(json.dumps, [*others, last | {"age_ts": 5}])))
    summary = import_archive(spark, [str(path)], dsn, server_name=SERVER, room_version="5")
    count = len(room.events)
    assert summary.outcomes == {"stored": count, "stray_keys": 1}
    assert (summary.lines, summary.rejects) == (count, 0)


def test_a_parquet_file_that_is_damaged_within_is_named_and_the_rest_is_stored(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    first, second = (
        generate_room(SHAPES["direct_chat"], 30, seed=seed, version="10", sign=False)
        for seed in range(2)
    )
    for name, room in (("a.parquet", first), ("b.parquet", second)):
        pq.write_table(
            pa.table({"pdu": room.pdus, "room_version": [room.room_version] * len(room)}),
            tmp_path / name,
            compression="snappy",
        )
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    whole[8:400] = bytes(392)
    (tmp_path / "a.parquet").write_bytes(whole)
    summary = import_archive(
        spark, [str(tmp_path)], dsn, server_name=SERVER, rejects=str(tmp_path / "dead")
    )
    assert (summary.outcomes["bad_file"], summary.outcomes["stored"]) == (1, len(second))
    [letter] = spark.read.parquet(str(tmp_path / "dead")).collect()
    assert (letter.source, letter.line, letter.outcome) == (
        str(tmp_path / "a.parquet"),
        None,
        "bad_file",
    )
    assert letter.reason


async def test_an_import_as_the_role_of_a_homeserver(
    spark: SparkSession, logins: Logins, another_dsn: str, tmp_path: Path
) -> None:
    """The role may do all that an import needs, into a new or a known room, and nothing more."""
    rooms = [
        generate_room(SHAPES["small_chat"].replaced(odd=ODD_SOME), 40, seed=seed, sign=False)
        for seed in range(3)
    ]
    write_ndjson((event for room in rooms for event in room), tmp_path / "rooms.ndjson")
    for dsn in (logins.runtime, another_dsn):
        await append_patiently(dsn, rooms[0].events[:20])
    summary = import_archive(
        spark,
        [str(tmp_path / "rooms.ndjson")],
        logins.runtime,
        server_name=SERVER,
        rejects=str(tmp_path / "dead"),
        part=10,
    )
    assert summary.rejects == 0
    await append_patiently(another_dsn, interleaved(rooms))
    assert await tables(logins.owner) == await tables(another_dsn)


def test_another_import_is_waited_for(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    write_ndjson(generate_room(SHAPES["direct_chat"], 10, sign=False), tmp_path / "room.ndjson")
    with staging(dsn), pytest.raises(storage.DatabaseConflict, match="another import"):
        import_archive(spark, [str(tmp_path / "room.ndjson")], dsn, server_name=SERVER)


async def test_a_task_enters_when_a_long_write_of_another_is_over(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    write_ndjson(generate_room(SHAPES["direct_chat"], 10, sign=False), tmp_path / "room.ndjson")
    connection = await asyncpg.connect(dsn)
    await connection.execute("BEGIN; LOCK TABLE stream_positions IN ROW EXCLUSIVE MODE")
    path = str(tmp_path / "room.ndjson")
    importing = asyncio.create_task(
        asyncio.to_thread(import_archive, spark, [path], dsn, server_name=SERVER, writers=1)
    )
    for waits in (True, False):  # it begins to wait, and gives up for now
        while not importing.done() and waits is not await connection.fetchval(WAITED_FOR):
            await connection.execute("SELECT pg_sleep(0.02)")
    await connection.execute("COMMIT")
    await connection.close()
    assert (await importing).outcomes["stored"] == 10


WAITED_FOR = (
    "SELECT EXISTS (SELECT FROM pg_locks WHERE NOT granted "
    "AND relation = 'stream_positions'::regclass "
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database()))"
)


def test_large_rooms_go_to_who_has_least_to_do() -> None:
    assert assign_rooms({"a": 50, "b": 20, "c": 20}, 2, 100) == {"a": 0, "b": 1, "c": 1}
    assert assign_rooms({}, 3, 10) == {}
