"""The answers from a mirror: a refresh equals a full count, and both equal the oracle."""

import random
from collections import Counter
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

import storage
from storage import Store
from storage.errors import InputError, StorageError
from storage.pipeline import QUESTIONS, answers, mirror
from storage.pipeline.lake import answering
from storage.pipeline.lake.event_rows import DayTable
from storage.pipeline.lake.questions import DAILY
from storage.testing import RoomBuilder
from tests.long_run import long_run
from tests.maintenance.rooms import SERVER, deliver
from tests.pipeline.mirrored import versions
from tests.pipeline.question_oracle import ORACLE, events_of
from tests.pipeline.test_mirror import CONFIG, change, rooms_of

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

SQL_SPREAD = """
    UPDATE events SET received_ts = received_ts - (event_nid % $2::bigint) * 86400000
    WHERE event_nid > $1::bigint"""
DAYS = 13
ALICE, BOB = f"@alice:{SERVER}", "@bob:s2.test:8448"


def signs() -> RoomBuilder:
    """The same text many times, and mxc URLs in several forms."""
    room = RoomBuilder("11", servers=(SERVER, "s2.test:8448"), seed=3)
    room.create(ALICE)
    room.join(ALICE)
    room.join_rules(ALICE, "public")
    room.join(BOB)
    for number in range(60):
        sender = (ALICE, BOB)[number % 2]
        content: dict[str, Any] = {"msgtype": "m.text", "body": "buy my tulips"}
        if number % 3 == 0:
            content = {"msgtype": "m.image", "body": "x", "url": f"mxc://s2.test:8448/a-{number}"}
            content["formatted_body"] = f'"<img src="mxc://{SERVER}/b_{number}">\n'
        room.send(sender, "m.room.message", content)
    return room


async def spread(store: Store, after: int, days: int) -> int:
    """Move the receipt of newer events to so many days; return the last number."""
    async with store.database.connection() as conn:
        await conn.execute(SQL_SPREAD, after, days)
        return int(await conn.fetchval("SELECT max(event_nid) FROM events"))


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=long_run) for n in range(1, 20))])
async def test_a_refresh_equals_a_full_count(
    spark: SparkSession, dsn: str, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After late history, redactions, purges, censoring and erasures, which change old days."""
    monkeypatch.setattr(answering, "FEW_EVENTS", 0 if seed % 3 == 1 else 200_000)
    rng = random.Random(seed)
    rooms = rooms_of(seed, 3, 90 if seed else 40)
    folder, parts = tmp_path / "mirror", 5 if seed else 2
    done: list[str] = []
    async with storage.open(dsn, server_name=SERVER, config=CONFIG) as store:
        await store.append(signs().pdus, room_version="11")
        last = await spread(store, 0, DAYS)
        mirror(spark, dsn, str(folder), ("events",), once=True)
        found = answers(spark, str(folder))
        assert found["activity"].days_read == found["activity"].days == DAYS
        for part in range(parts):
            for room in rooms:
                size = -(-len(room.events) // parts)
                some = room.events[part * size : (part + 1) * size]
                if some:
                    await deliver(store, replace(room, events=some), batch=50)
            done += [await change(store, rooms, rng) for _ in range(rng.randrange(4))]
            last = await spread(store, last, 1 + rng.randrange(DAYS))
            mirror(spark, dsn, str(folder), ("events",), once=True)
            if seed or part == parts - 1:
                found = answers(spark, str(folder))
    events = events_of(folder)
    for name in QUESTIONS:
        wanted = Counter(ORACLE[name](events))
        assert wanted
        assert rows_of(found[name].rows) == wanted, (name, done)
    if seed:
        full = answers(spark, str(folder), folder=str(tmp_path / "full"), full=True)
        for name in DAILY:
            assert counted(folder / "answers" / name) == counted(tmp_path / "full" / name), name
        for name in QUESTIONS:
            assert rows_of(full[name].rows) == rows_of(found[name].rows), (name, done)
    before = versions(folder / "answers")
    assert answers(spark, str(folder))["growth"].days_read == 0
    assert versions(folder / "answers") == before


async def test_a_refresh_reads_the_changed_days_or_all(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    """All, if the log does not have the version that was read any more."""
    room = signs()
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus[:-1], room_version="11")
        last = await spread(store, 0, DAYS)
        mirror(None, dsn, str(tmp_path), ("events",), once=True)
        assert answers(spark, str(tmp_path), ("media",))["media"].days_read == DAYS
        media = tmp_path / "answers" / "daily_media"
        kept = len(list(media.rglob("*.parquet")))
        await store.append(room.pdus[-1:])
        await spread(store, last, 1)
    mirror(None, dsn, str(tmp_path), ("events",), once=True)
    assert answers(spark, str(tmp_path), ("media",))["media"].days_read == 1
    assert len(list(media.rglob("*.parquet"))) == kept + 1
    # nothing is counted again, and what was replaced goes
    assert answers(spark, str(tmp_path), ("media",), keep_hours=0)["media"].days_read == 0
    assert len(list(media.rglob("*.parquet"))) == kept
    one, other = (
        DayTable.open(str(tmp_path / "answers" / "daily_media"), DAILY["daily_media"], 1)
        for _ in range(2)
    )
    state = one.state()
    assert state is not None
    one.replace([], [], replace(state, version=10_000))
    with pytest.raises(StorageError, match="another process has written"):
        other.replace([], [], state)
    assert answers(spark, str(tmp_path), ("media",))["media"].days_read == DAYS


async def test_a_clock_at_the_end_of_time_breaks_no_answer(
    spark: SparkSession, dsn: str, tmp_path: Path
) -> None:
    """Old room versions take any 64-bit number, and a difference of two does not fit."""
    room = RoomBuilder("5", servers=(SERVER, "s2.test"), seed=4)
    room.start(ALICE)
    room.join("@bob:s2.test")
    for clock in (-(2**63), 2**63 - 1, -(2**63)):
        room.message("@bob:s2.test", ts=clock)
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(room.pdus, room_version="5")
    mirror(None, dsn, str(tmp_path), ("events",), once=True)
    found = answers(spark, str(tmp_path))
    rows = {row["server"]: row for row in found["servers"].rows.collect()}
    assert rows["s2.test"]["events"] == 4
    assert rows["s2.test"]["p95_lag_ms"] > 2**52
    assert all(answer.rows.count() >= 0 for answer in found.values())


def test_refused(tmp_path: Path, spark: SparkSession) -> None:
    with pytest.raises(InputError, match="no question weather"):
        answers(spark, str(tmp_path), ("weather",))
    with pytest.raises(InputError, match="no such table"):
        answers(spark, str(tmp_path))
    with pytest.raises(InputError, match="tasks"):
        answers(spark, str(tmp_path), tasks=0)


def counted(folder: Path) -> Counter[tuple[Any, ...]]:
    table = DeltaTable(folder).to_pyarrow_table()
    return Counter(zip(*(column.to_pylist() for column in table.columns), strict=True))


def rows_of(frame: Any) -> Counter[tuple[Any, ...]]:
    """The rows; the minute of joins, which is in UTC and has no zone, in seconds."""
    return Counter(
        tuple(
            (one - datetime(1970, 1, 1)) // timedelta(seconds=1)  # noqa: DTZ001  # as in the answer
            if isinstance(one, datetime)
            else one
            for one in row
        )
        for row in frame.collect()
    )
