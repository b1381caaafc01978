"""`room-storage stats`: the counts are right, the sizes are those of Postgres.

An empty database has them too.
"""

import json
import re

import storage
from storage.testing import SHAPES, generate_room
from tests.cli.running import room_storage


async def test_counts_and_sizes_for_programs(dsn: str) -> None:
    rooms = [generate_room(SHAPES["small_chat"], 60, seed=seed) for seed in (30, 90)]
    async with storage.open(dsn, server_name="s1.test") as store:
        for room in rooms:
            await store.append(room.pdus)
        sizes = {room.room_id: len(await store.current_state(room.room_id)) for room in rooms}
    done = room_storage("stats", "--json", "--dsn", dsn)
    assert (done.returncode, done.stderr) == (0, "")
    told = json.loads(done.stdout)
    counts = told["counts"]
    assert (counts["rooms"], counts["events"], counts["missing_events"]) == (2, 120, 0)
    received = sum(len(pdu) for room in rooms for pdu in room.pdus)
    assert 0.2 * received < counts["json_bytes"] < 0.6 * received
    forms = told["stored_forms"]
    assert (forms["events"], forms["plain_events"], forms["saving"]) == (120, 0, 0.0)
    assert forms["received_bytes"] == round(received / 120, 1)
    assert forms["stored_bytes"] == forms["encoded_bytes"] == round(counts["json_bytes"] / 120, 1)
    assert counts["database_bytes"] > counts["json_bytes"]
    assert {state["room_id"]: state["state_entries"] for state in told["largest_states"]} == sizes
    events = next(table for table in told["tables"] if table["table_name"] == "events")
    assert (
        events["total_bytes"]
        == events["table_bytes"] + events["toast_bytes"] + events["index_bytes"]
        > counts["json_bytes"]
    )
    whole = sum(table["total_bytes"] for table in told["tables"])
    assert whole < counts["database_bytes"]
    assert [(one["days"], one["days_measured"], one["events"]) for one in told["growth"]] == [
        (1, 1.0, 120),
        (7, 1.0, 120),
        (30, 1.0, 120),
    ]
    assert {one["bytes_per_day"] for one in told["growth"]} == {whole}
    assert told["forecast"] == []


def test_a_negative_number_of_states_is_refused(dsn: str) -> None:
    done = room_storage("stats", "--top", "-1", STORAGE_DSN=dsn)
    assert (done.returncode, done.stdout, "--top" in done.stderr) == (2, "", True)


def test_an_empty_database_for_people(dsn: str) -> None:
    done = room_storage("stats", STORAGE_DSN=dsn)
    assert (done.returncode, done.stderr) == (0, "")
    assert ["events", "0"] in [line.split() for line in done.stdout.splitlines()]
    assert "On disk" in done.stdout
    assert ["last", "day", "0", "0.0", "0"] in [
        line.replace("│", " ").split() for line in done.stdout.splitlines()
    ]
    assert "Growth is the events received in a period, times the bytes" in done.stdout
    assert "Forecast: not enough history. It needs a full day" in done.stdout
    assert not re.search("database +database", done.stdout)
    for wrong in ("-1", "9" * 30):
        assert room_storage("stats", "--top", wrong, STORAGE_DSN=dsn).returncode == 2


async def test_a_store_with_history_has_a_forecast(dsn: str) -> None:
    """An import of 1,000 events, three days ago, and 10 events a day since."""
    room = generate_room(SHAPES["small_chat"], 1_030, seed=1)
    async with storage.open(dsn, server_name="s1.test") as store:
        await store.append(room.pdus)
        async with store.database.connection() as conn:
            await conn.execute(
                """
                UPDATE events
                SET received_ts = (extract(epoch FROM now()) - 3600) * 1000
                    - CASE WHEN number <= 1000 THEN 3.5 ELSE number % 3 END * 86400000::bigint
                FROM (SELECT event_nid, row_number() OVER () AS number FROM events) AS e
                WHERE e.event_nid = events.event_nid
                """
            )
    told = json.loads(room_storage("stats", "--json", "--dsn", dsn).stdout)
    whole = sum(table["total_bytes"] for table in told["tables"])
    expected = told["counts"]["database_bytes"] + 30 * 10 * whole / 1_030
    assert told["forecast"][0] == {"days": 30, "database_bytes": round(expected)}
    lines = room_storage("stats", "--dsn", dsn).stdout
    assert "in 365 days" in lines
    assert "not enough history" not in lines
