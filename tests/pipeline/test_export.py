"""An export has exactly the stored events; a resumed one adds the new events.

Importing an export gives an equal store.
"""

import json
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import storage
from storage.database.arrow_results import arrow_snapshot
from storage.pipeline import export_parquet, import_archive, verify
from storage.pipeline.export import last_export
from storage.pipeline.imports.lines import literal
from storage.pipeline.source.rows import read_rows
from storage.testing import (
    ODD_SOME,
    SHAPES,
    GeneratedRoom,
    build_room,
    deliver_with_gap,
    generate_room,
)
from tests.maintenance.rooms import findings
from tests.pipeline.planted import with_planted_creates
from tests.pipeline.stores import SERVER, fill, tables
from tests.pipeline.test_verdicts_kept import SHAPE as VERDICTS
from tests.pipeline.test_verdicts_kept import exported, parts_with_verdicts

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


async def test_an_import_of_an_export_is_an_equal_store(
    spark: SparkSession, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    odd = generate_room(SHAPES["small_chat"].replaced(odd=ODD_SOME), 60, seed=3, sign=False)
    gap = deliver_with_gap(
        build_room(SHAPES["fork_heavy"], 50, seed=4, version="12", sign=False), 15, 30
    )
    half = len(gap) // 2
    tmp_path /= "to [here] or {there}*"
    await fill(dsn, odd)
    await fill(dsn, GeneratedRoom(gap.room_id, gap.room_version, gap.events[:half], gap.keys))
    first = export_parquet(spark, dsn, str(tmp_path), partitions=2)
    await fill(dsn, gap, "another")
    second = export_parquet(spark, dsn, str(tmp_path), since=first.upto, partitions=2)
    nothing = export_parquet(spark, dsn, str(tmp_path), since=second.upto, partitions=2)
    assert last_export(str(tmp_path)) == nothing
    outliers = sum(event.origin == "outlier" for event in gap)
    assert (nothing.state_deltas, nothing.upto) == (0, second.upto)
    assert nothing.events <= outliers
    summary = import_archive(spark, [str(tmp_path / "events")], another_dsn, server_name=SERVER)
    assert summary.rejects == 0
    assert await tables(another_dsn) == await tables(dsn)
    exported = (
        spark.read.parquet(literal(str(tmp_path / "events")))
        .where("origin <> 'outlier'")
        .select("event_id")
        .collect()
    )
    assert len(exported) == len({row.event_id for row in exported})


async def test_create_events_that_anybody_planted_come_through(
    spark: SparkSession, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    for number, version in enumerate(("1", "5", "10", "11", "12")):
        room = generate_room(
            SHAPES["direct_chat"], 12, seed=20 + number, version=version, sign=False
        )
        await fill(dsn, with_planted_creates(room, at=1 + number % 2 * 10))
    export_parquet(spark, dsn, str(tmp_path), partitions=2)
    summary = import_archive(spark, [str(tmp_path / "events")], another_dsn, server_name=SERVER)
    assert summary.rejects == 0
    assert await tables(another_dsn) == await tables(dsn)
    async with storage.open(another_dsn, server_name=SERVER) as copy:
        assert await findings(copy) == []
    assert not verify(spark, another_dsn).count()
    again = import_archive(spark, [str(tmp_path / "events")], another_dsn, server_name=SERVER)
    assert (again.rejects, again.outcomes["stored"]) == (0, 0)


@pytest.mark.parametrize("by", ["spark", "room-storage"])
async def test_an_import_on_spark_has_the_same_verdicts(
    spark: SparkSession, dsn: str, another_dsn: str, tmp_path: Path, by: str
) -> None:
    """Of exports of both kinds. Events of the first export are readmitted before the second."""
    room, since = build_room(VERDICTS, 150, seed=2, sign=False), None
    async with storage.open(dsn, server_name=SERVER) as store:
        async for start in parts_with_verdicts(store, room, 2):
            if by == "spark" and start in (60, 135):
                since = export_parquet(spark, dsn, str(tmp_path), since=since, partitions=2).upto
        archive = tmp_path / ("events" if by == "spark" else "rooms.ndjson")
        if by == "room-storage":
            await exported(store, archive)
    for _ in range(2):  # the second time all is there already
        summary = import_archive(spark, [str(archive)], another_dsn, server_name=SERVER)
        assert summary.rejects == 0
    async with storage.open(another_dsn, server_name=SERVER) as copy:
        assert await findings(copy) == []
    expected, found = await tables(dsn), await tables(another_dsn)
    for one in (expected, found):
        del one["counts"]["state_groups"], one["counts"]["audiences"]
    assert found == expected


async def test_state_deltas_and_visibility_are_those_of_the_store(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    room = generate_room(SHAPES["join_leave_storm"], 40, sign=False)
    await fill(dsn, room)
    export_parquet(spark, dsn, str(tmp_path), partitions=2)
    state = {}
    for row in (
        spark.read.parquet(str(tmp_path / "state_deltas")).orderBy("stream_ordering").collect()
    ):
        state[row.type, row.state_key] = row.event_id
    async with storage.open(dsn, server_name=SERVER) as store:
        assert {
            key: one for key, one in state.items() if one is not None
        } == await store.current_state(room.room_id)
        users = {
            event.state_key
            for event in (await store.events([one.event_id for one in room])).values()
            if event.type == "m.room.member"
        }
        user = min(one for one in users if one is not None and one.endswith(f":{SERVER}"))
        visible = await store.visible_to_user(user, [event.event_id for event in room])
    events = (
        spark.read.parquet(str(tmp_path / "events"))
        .where("rejected IS NULL AND NOT soft_failed")
        .alias("e")
    )
    sight = spark.read.parquet(str(tmp_path / "visibility")).alias("v")
    own = sight.where(sight.principal == user)
    seen = events.join(own, "room_id").where(
        "audience >= first_audience AND (end_audience IS NULL OR audience < end_audience)"
    )
    own_sight = {row.event_id for row in seen.select("event_id").collect()}
    assert own_sight
    assert (
        own_sight <= visible
    )  # what everybody may see, or whoever joins, stands under principals of its own


async def test_rows_come_in_order_however_they_were_asked_for(dsn: str) -> None:
    known, strange = (
        generate_room(SHAPES["direct_chat"], 30, seed=seed, sign=False) for seed in (4, 5)
    )
    await fill(dsn, known)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(strange.pdus, room_version=strange.room_version, origin="outlier")
    with arrow_snapshot(dsn) as conn:
        nids = conn.table("SELECT event_nid FROM events ORDER BY event_id").column(0).to_pylist()
        [batch] = read_rows(conn, nids, ("stream_ordering", "origin"))
    positions = batch.column("stream_ordering").to_pylist()
    outliers = positions.count(None)
    assert len(positions) == len(nids) > outliers > 0
    assert positions[:outliers] == [None] * outliers
    assert positions[outliers:] == sorted(positions[outliers:])


async def test_a_wrong_token_is_refused(spark: SparkSession, dsn: str, tmp_path: Path) -> None:
    await fill(dsn, generate_room(SHAPES["direct_chat"], 10, sign=False))
    with pytest.raises(storage.InvalidToken):
        export_parquet(spark, dsn, str(tmp_path), since="s1~nonsense")


WHOLE = {
    "number": 3,
    "since": None,
    "upto": "s1~x",
    "events": 7,
    "state_deltas": 2,
    "visibility": 1,
}


def test_a_manifest_that_cannot_be_read_is_one_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "manifests").mkdir()
    manifest = tmp_path / "manifests" / "3.json"
    manifest.write_text(json.dumps(WHOLE))
    found = last_export(str(tmp_path))
    assert found is not None
    assert (found.number, found.upto) == (3, "s1~x")
    for wrong, told in (
        (json.dumps(WHOLE | {"made_by": "a later release"}), "too much: made_by"),
        (json.dumps({"number": 3}), "lacks events, since, state_deltas, upto, visibility"),
        (json.dumps(WHOLE)[:-20], "cut off"),
        ("", "cut off"),
        ("[]", "lacks"),
        (json.dumps(WHOLE | {"upto": 5}), "another type"),
    ):
        manifest.write_text(wrong)
        with pytest.raises(storage.InputError, match=f"3.json is no manifest of an export.*{told}"):
            last_export(str(tmp_path))


async def test_a_manifest_is_whole_at_its_name(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    """What an export that was killed while it wrote the manifest has left is no manifest."""
    await fill(dsn, generate_room(SHAPES["direct_chat"], 10, sign=False))
    (tmp_path / "manifests").mkdir()
    (tmp_path / "manifests" / "1.json.new").write_text('{"number": 1, "si')
    made = export_parquet(spark, dsn, str(tmp_path))
    assert last_export(str(tmp_path)) == made
    assert [path.name for path in (tmp_path / "manifests").iterdir()] == ["1.json"]
