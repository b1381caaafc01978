"""The benchmarks' large database is one that the engine could have written.

Its bytes are those of valid events.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

import storage
from benchmarks.crowd import (
    EVERYWHERE,
    FEW,
    HUNDRED,
    MANY,
    SERVER,
    VERSION,
    Crowd,
    Pen,
    build,
    room_id,
)
from storage.event import parse
from storage.ids import RoomId
from storage.maintenance.verify.run import verify
from storage.testing import RoomBuilder
from tests.cli.running import ROOT, environment
from tests.long_run import long_run

CROWD = Crowd(rooms=12, events=1_200, members_max=40)


async def test_nothing_is_to_be_found_in_it(dsn: str) -> None:
    await build(dsn, CROWD, told=False)
    async with storage.open(dsn, server_name=SERVER) as store:
        assert [finding async for finding in verify(store.database, server_name=SERVER)] == []
        async with store.database.connection() as conn:
            assert await conn.fetchval("SELECT count(*) FROM events") == CROWD.events
        everything = await store.sync(EVERYWHERE, timeline_limit=5)
        assert everything.join.keys() == {room_id(number) for number in range(CROWD.rooms)}
        page = await store.messages(RoomId(room_id(CROWD.hall)), EVERYWHERE, limit=1_000)
        assert page.end is None
        assert Counter(event.type for event in page.chunk)["m.room.message"] > 50


def test_events_are_valid() -> None:
    pen = Pen.of(3)
    written = [*pen.begun(EVERYWHERE), pen.join(MANY), pen.leave(MANY)]
    written.append(
        pen.write(
            EVERYWHERE,
            "m.room.message",
            [pen.auth["m.room.create", ""]],
            ('{"body":"x"}', "{}"),
            ts=5,
        )[1]
    )
    events = [parse(raw, VERSION) for raw in written]
    assert all(event.content_hash_valid for event in events)
    assert events[-1].event_id == pen.tip
    assert [event.depth for event in events] == list(range(1, len(events) + 1))
    assert [event.prev_event_ids for event in events[1:]] == [
        (event.event_id,) for event in events[:-1]
    ]
    room = RoomBuilder(VERSION, sign=False)
    room.start(EVERYWHERE)
    assert [event.type for event in events[:5]] == [event.type for event in room.events]


def test_sizes() -> None:
    crowd = Crowd(10_000, 5_000_000, 50_000)
    assert [len(crowd.rooms_of(user)) for user in (EVERYWHERE, MANY, HUNDRED, FEW)] == [
        10_000,
        1_000,
        100,
        10,
    ]
    assert (crowd.size(0), crowd.size(crowd.hall), crowd.size(9_999)) == (50_000, 5_000, 10)
    assert {crowd.size(number) for number in crowd.rooms_of(HUNDRED)} == {10}
    assert max(crowd.activity()) == crowd.activity()[crowd.hall]
    assert len(set(crowd.members(crowd.hall))) == 5_002


MOST_STATEMENTS = {"sync": {"": 4}, "messages": {"": 2, "context": 3}, "federation": {"": 2}}
"""By the beginning of the question's name; the longest that fits."""


@pytest.mark.slow
@pytest.mark.timeout(600)
@long_run
def test_the_benchmarks_of_reads_run_within_their_statements(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "benchmarks",
        *MOST_STATEMENTS,
        "--quick",
        "--results",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, cwd=ROOT, env=environment(), check=False, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    for name, limits in MOST_STATEMENTS.items():
        results = json.loads((tmp_path / f"{name}.quick.json").read_text())["results"]
        assert results.pop("throughput")
        for question, told in results.items():
            most = limits[max((start for start in limits if question.startswith(start)), key=len)]
            sides = [
                side
                for side in told.values()
                if isinstance(side, dict) and "statements" in side and "ms" in side
            ]
            assert len(sides) == 2
            assert all(1 <= side["statements"] <= most for side in sides), question
