"""`room-storage stats`: the counts are right, the sizes are those of Postgres.

An empty database has them too.
"""

import json

import storage
from storage.testing import SHAPES, generate_room
from tests.cli.running import room_storage


async def test_counts_and_sizes_for_programs(dsn: str) -> None:
    rooms = [generate_room(SHAPES["small_chat"], count, seed=count) for count in (30, 90)]
    async with storage.open(dsn, server_name="s1.test") as store:
        for room in rooms:
            await store.append(room.pdus)
        sizes = {room.room_id: len(await store.current_state(room.room_id)) for room in rooms}
    done = room_storage("stats", "--json", "--dsn", dsn)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    counts = told["counts"]
    assert (counts["rooms"], counts["events"], counts["missing_events"]) == (2, 120, 0)
    assert counts["json_bytes"] == sum(len(pdu) for room in rooms for pdu in room.pdus)
    assert counts["database_bytes"] > counts["json_bytes"]
    assert {state["room_id"]: state["state_entries"] for state in told["largest_states"]} == sizes
    events = next(table for table in told["tables"] if table["table_name"] == "events")
    assert (
        events["total_bytes"]
        == events["table_bytes"] + events["toast_bytes"] + events["index_bytes"]
        > counts["json_bytes"]
    )
    assert sum(table["total_bytes"] for table in told["tables"]) < counts["database_bytes"]


def test_an_empty_database_for_people(dsn: str) -> None:
    done = room_storage("stats", STORAGE_DSN=dsn)
    assert (done.returncode, done.stderr) == (0, "")
    assert ["events", "0"] in [line.split() for line in done.stdout.splitlines()]
    assert "On disk" in done.stdout
