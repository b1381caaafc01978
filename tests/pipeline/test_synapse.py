"""A Synapse database and /backfill responses give the tables of appending the events one by one."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import storage
from storage.errors import InputError
from storage.event.ndjson import pdus_of
from storage.pipeline import Synapse, import_archive
from storage.pipeline.synapse.source import SynapseCheckpoint
from storage.testing import (
    ODD_SOME,
    SHAPES,
    GeneratedEvent,
    build_room,
    deliver_with_gap,
    generate_room,
)
from tests.pipeline.planted import with_planted_creates
from tests.pipeline.stores import SERVER, tables
from tests.pipeline.synapse_tables import persist, synapse_database

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


async def append(dsn: str, events: Sequence[GeneratedEvent]) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        for event in events:
            given = {} if event.state_before is None else {event.event_id: event.state_before}
            await store.append(
                [event.pdu],
                room_version=event.room_version,
                origin=event.origin,
                state_before=given,
            )


async def test_a_running_synapse_is_followed(
    spark: SparkSession, server_dsn: str, worker_id: str, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    """Rooms with a gap and with odd events; then what came since, history among it."""
    odd = list(generate_room(SHAPES["small_chat"].replaced(odd=ODD_SOME), 60, seed=3, sign=False))
    distinct = list({event.event_id: event for event in reversed(odd)}.values())[::-1]
    gap = deliver_with_gap(
        build_room(SHAPES["fork_heavy"], 50, seed=4, version="10", sign=False), 15, 30
    )
    before = [event for event in gap if event.origin != "backfill"]
    outliers = {event.event_id for event in before if event.origin == "outlier"}
    history = [event for event in gap if event.origin == "backfill"]
    assert outliers
    assert any(event.state_before for event in before)
    async with synapse_database(server_dsn, worker_id) as (source, connection):
        first = [*distinct[:40], *before]
        end = await persist(connection, first)
        begun = Synapse.of(source)
        summary = import_archive(
            spark, begun, dsn, server_name=SERVER, rejects=str(tmp_path / "dead")
        )
        await append(another_dsn, first)
        assert await tables(dsn) == await tables(another_dsn)
        assert begun.upto == SynapseCheckpoint(len(first), 0)
        assert summary.lines == len(first)
        later = distinct[40:]
        await persist(connection, later, end)
        old = history[
            : next(index for index, event in enumerate(history) if event.event_id in outliers)
        ]
        await persist(connection, old, -1, step=-1)
        again = Synapse.of(source, begun.upto)
        summary = import_archive(
            spark, again, dsn, server_name=SERVER, rejects=str(tmp_path / "dead")
        )
        await append(another_dsn, [*later, *old])
        assert await tables(dsn) == await tables(another_dsn)
        assert again.upto == SynapseCheckpoint(len(first) + len(later), -len(old))
        assert SynapseCheckpoint.parse(str(again.upto)) == again.upto
        assert summary.outcomes["duplicate"] > 0, (
            "an import goes some way back, as writers commit out of order"
        )
        changed = await connection.fetchval(
            "SELECT count(*) FROM pg_stat_user_tables WHERE n_tup_upd + n_tup_del > 0"
        )
    assert changed == 0


async def test_create_events_that_anybody_planted(
    spark: SparkSession, server_dsn: str, worker_id: str, dsn: str, another_dsn: str
) -> None:
    room = generate_room(SHAPES["direct_chat"], 20, seed=5, version="10", sign=False)
    events = list(with_planted_creates(room, at=1))
    async with synapse_database(server_dsn, worker_id) as (source, connection):
        await persist(connection, events)
        summary = import_archive(spark, Synapse.of(source), dsn, server_name=SERVER)
    assert summary.rejects == 0
    await append(another_dsn, events)
    assert await tables(dsn) == await tables(another_dsn)


async def test_an_outlier_that_joined_the_timeline_is_found(
    spark: SparkSession, server_dsn: str, worker_id: str, dsn: str
) -> None:
    room = list(generate_room(SHAPES["direct_chat"], 20, seed=5, sign=False))
    async with synapse_database(server_dsn, worker_id) as (source, connection):
        await persist(connection, room)
        await connection.execute(
            "UPDATE events SET outlier = true WHERE event_id = $1", room[-1].event_id
        )
        begun = Synapse.of(source)
        import_archive(spark, begun, dsn, server_name=SERVER)
        assert {one[0]: one[2] for one in (await tables(dsn))["events"]}[room[-1].event_id] is True
        await connection.execute(
            "UPDATE events SET outlier = false WHERE event_id = $1", room[-1].event_id
        )
        await connection.execute(
            "UPDATE events SET stream_ordering = stream_ordering + 50000 WHERE stream_ordering = 19"
        )
        await connection.execute(
            "INSERT INTO ex_outlier_stream VALUES (50001, $1, 7, 'master')", room[-1].event_id
        )
        import_archive(
            spark, Synapse.of(source, SynapseCheckpoint(50000, 0)), dsn, server_name=SERVER
        )
    found = {one[0]: one[2] for one in (await tables(dsn))["events"]}
    assert found[room[-1].event_id] is False


async def test_answers_of_backfill(
    spark: SparkSession, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    """Newest first, as servers answer; two answers, the later history in the first."""
    room = list(generate_room(SHAPES["small_chat"], 60, seed=6, version="11", sign=False))
    begin, end = room[:20], room[20:]
    for name, part in (("1.json", end[20:]), ("2.json", end[:20])):
        pdus = [json.loads(event.pdu) for event in reversed(part)]
        (tmp_path / name).write_text(
            json.dumps({"origin": "s2.test", "origin_server_ts": 1, "pdus": pdus}, indent=1)
        )
    (tmp_path / "3.json").write_text('{"pdus": 7}')
    for target in (dsn, another_dsn):
        await append(target, begin)
    paths = [str(tmp_path / name) for name in ("1.json", "2.json", "3.json")]
    summary = import_archive(spark, paths, dsn, server_name=SERVER, rejects=str(tmp_path / "dead"))
    assert summary.outcomes["stored"] == len(end)
    assert [
        (row.source, row.outcome) for row in spark.read.parquet(str(tmp_path / "dead")).collect()
    ] == [(paths[2], "bad_line")]
    async with storage.open(another_dsn, server_name=SERVER) as store:
        for event in end:
            await store.append(
                [json.dumps(json.loads(event.pdu), indent=1).encode()], origin="backfill"
            )
    mine, theirs = await tables(dsn), await tables(another_dsn)
    for found in (mine, theirs):
        found["events"] = [
            tuple(one for one in row if not isinstance(one, bytes)) for row in found["events"]
        ]
    assert mine == theirs


def test_pdus_are_cut_out_of_an_answer_byte_for_byte() -> None:
    assert pdus_of(b' {"x": [1], "pdus" : [ {"a": 1 } ,{"b":[{}]}]} ') == [
        b'{"a": 1 }',
        b'{"b":[{}]}',
    ]
    assert pdus_of(b'{"pdus":[]}') == []


def test_a_position_that_cannot_be_read_is_refused() -> None:
    with pytest.raises(InputError):
        SynapseCheckpoint.parse("12")
