"""A Synapse is followed until the swap: each import takes the new events.

In the end the tables are those of appending one by one.
"""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import storage
from storage.errors import InputError
from storage.pipeline import import_synapse
from storage.pipeline.imports.lines import place_of, placed
from storage.pipeline.synapse.checkpoint import furthest, keep, recalled
from storage.pipeline.synapse.source import Synapse, SynapseCheckpoint
from storage.testing import SHAPES, build_room, deliver_with_gap, generate_room
from tests.cli.running import room_storage_beside
from tests.long_run import long_run
from tests.pipeline.java import COMMAND
from tests.pipeline.stores import SERVER, fill, tables
from tests.pipeline.synapse_tables import persist, synapse_database

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


async def test_until_the_switch(
    spark: SparkSession, server_dsn: str, worker_id: str, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    """A room with a gap, whose outliers join the timeline with the history.

    They get positions that no event has, the last one of all.
    """
    gap = deliver_with_gap(
        build_room(SHAPES["fork_heavy"], 50, seed=4, version="10", sign=False), 15, 30
    )
    talk = generate_room(SHAPES["small_chat"], 40, seed=3, sign=False)
    before = [event for event in gap if event.origin != "backfill"]
    history = [event for event in gap if event.origin == "backfill"]
    outliers = {event.event_id for event in before if event.origin == "outlier"}
    assert any(event.event_id in outliers for event in history)
    memory = tmp_path / "synapse.json"
    async with synapse_database(server_dsn, worker_id) as (source, connection):
        end = await persist(connection, [*before, *list(talk)[:30]])
        first = import_synapse(spark, source, dsn, memory=memory, server_name=SERVER)
        assert (
            first.outcomes["stored"] + first.outcomes["soft_failed"] + first.outcomes["rejected"]
            == len(before) + 30
        )
        assert recalled(memory, dsn) == (SynapseCheckpoint(end - 1, 0), ())
        await persist(connection, list(talk)[30:], end)
        for number, event in enumerate(history, 1):
            if event.event_id in outliers:
                await connection.execute(
                    "UPDATE events SET outlier = false WHERE event_id = $1", event.event_id
                )
                await connection.execute(
                    "INSERT INTO ex_outlier_stream VALUES ($1, $2, 7, 'master')",
                    -number,
                    event.event_id,
                )
            else:
                await persist(connection, [event], -number, step=-1)
        import_synapse(spark, source, dsn, memory=memory, server_name=SERVER)
        assert recalled(memory, dsn) == (SynapseCheckpoint(end + 9, -len(history)), ())
        await fill(another_dsn, talk)
        await fill(another_dsn, gap)
        followed = await tables(dsn)
        assert followed == await tables(another_dsn)
        again = import_synapse(spark, source, dsn, memory=memory, server_name=SERVER)
        assert set(again.outcomes) == {"duplicate"}
        await connection.execute(
            "DELETE FROM event_json WHERE event_id = $1", talk.events[-1].event_id
        )
        memory.unlink()
        once_more = import_synapse(
            spark, source, dsn, memory=memory, server_name=SERVER, rejects=str(tmp_path / "dead")
        )
        assert set(once_more.outcomes) == {"duplicate", "bad_line"}
        [letter] = spark.read.parquet(str(tmp_path / "dead")).collect()
        assert (letter.source, letter.line) == ("events by stream ordering", end + 9)
        assert "event_json" in letter.reason
        assert await tables(dsn) == followed


async def test_what_lacked_something_is_tried_again_however_far_back(
    spark: SparkSession, server_dsn: str, worker_id: str, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    """An event came without its parent, which Synapse has fetched since.

    The import tries it again, 30,000 positions back.
    """
    room = generate_room(SHAPES["direct_chat"], 30, seed=2, sign=False)
    other = generate_room(SHAPES["direct_chat"], 5, seed=3, sign=False)
    events = list(room)
    memory = tmp_path / "synapse.json"
    async with synapse_database(server_dsn, worker_id) as (source, connection):
        await persist(connection, events[:20])
        await persist(connection, events[21:24], 101)
        end = await persist(connection, other, 30_001)
        first = import_synapse(spark, source, dsn, memory=memory, server_name=SERVER)
        assert first.outcomes["missing_parents"] > 0
        position, lacking = recalled(memory, dsn)
        assert position == SynapseCheckpoint(end - 1, 0)
        assert next(map(placed, lacking)) == (0, 101)
        await persist(connection, [events[20], *events[24:]], 50_001)
        second = import_synapse(spark, source, dsn, memory=memory, server_name=SERVER)
    assert second.rejects == 0
    assert recalled(memory, dsn)[1] == ()
    await fill(another_dsn, room)
    await fill(another_dsn, other)
    imported, appended = await tables(dsn), await tables(another_dsn)
    assert imported == appended


def test_positions_near_each_other_are_read_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Synapse, "within", lambda _, begin, end: iter([(begin, end)]))
    lacking = [
        place_of(0, 20),
        place_of(0, 90),
        place_of(0, 5_000),
        place_of(0, 60_000),
        place_of(1, 7),
    ]
    source = Synapse(
        "", SynapseCheckpoint(100_000, -20_000), SynapseCheckpoint(100_010, -20_000), tuple(lacking)
    )
    again = [(one.file, one.begin, one.end) for one in source.ranges(1)[1:] if one.file in (0, 1)]
    assert again[-4:] == [(0, 20, 91), (0, 5_000, 5_001), (0, 60_000, 60_001), (1, -7, -6)]


async def test_what_joins_the_timeline_last_is_not_overlooked(
    server_dsn: str, worker_id: str
) -> None:
    room = generate_room(SHAPES["direct_chat"], 10, sign=False)
    async with synapse_database(server_dsn, worker_id) as (source, connection):
        await persist(connection, room)
        await connection.execute(
            "INSERT INTO ex_outlier_stream VALUES (11, $1, 7, 'master')", room.events[-1].event_id
        )
        assert Synapse.of(source).upto == SynapseCheckpoint(11, 0)


async def test_a_memory_of_something_else_is_refused(
    spark: SparkSession, server_dsn: str, worker_id: str, dsn: str, tmp_path: Path
) -> None:
    memory = tmp_path / "synapse.json"
    assert recalled(memory, dsn) == (None, ())
    async with storage.open(dsn, server_name=SERVER):
        pass  # from now on the database has a name of its own
    keep(memory, dsn, SynapseCheckpoint(1_000_000, -5), [7])
    assert recalled(memory, dsn) == (SynapseCheckpoint(1_000_000, -5), (7,))
    async with synapse_database(server_dsn, worker_id) as (source, _):
        with pytest.raises(InputError, match="of another one"):
            import_synapse(spark, source, dsn, memory=memory)
    memory.write_text(json.dumps({"live": 1, "history": 0, "deployment": "another"}))
    with pytest.raises(InputError, match="another database"):
        recalled(memory, dsn)
    for wrong in (
        "",
        "[]",
        '{"live": 1, "history": 0, "lacking": 3, "deployment": "y"}',
        '{"live": 1}',
        '{"live": "x", "history": 0, "deployment": "y"}',
    ):
        memory.write_text(wrong)
        with pytest.raises(InputError, match="does not say how far"):
            recalled(memory, dsn)


@long_run
async def test_the_command(server_dsn: str, worker_id: str, dsn: str, tmp_path: Path) -> None:
    room = generate_room(SHAPES["direct_chat"], 20, sign=False)
    settings = ("--master", "local[1]", *COMMAND, "--server-name", SERVER, "--json")
    async with synapse_database(server_dsn, worker_id) as (source, connection):
        await persist(connection, room)
        done = await room_storage_beside(
            "spark",
            "import-synapse",
            source,
            "--memory",
            str(tmp_path / "memory"),
            "--dsn",
            dsn,
            *settings,
        )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["stored"] == 20
    assert recalled(tmp_path / "memory", dsn) == (SynapseCheckpoint(20, 0), ())


def test_a_position_never_goes_back() -> None:
    assert furthest(None, SynapseCheckpoint(5, -6)) == SynapseCheckpoint(5, -6)
    assert furthest(SynapseCheckpoint(7, -3), SynapseCheckpoint(5, -6)) == SynapseCheckpoint(7, -6)
