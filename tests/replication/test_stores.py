"""Two stores on one database, one of which hears of the other's events by replication."""

from dataclasses import replace

import pytest

import storage
from storage.replication import Client, Server
from storage.testing import RoomBuilder
from tests.replication.processes import QUICK, Seen

EVENTS = 60


@pytest.mark.parametrize("follow_ms", [1, 60_000])
async def test_events_of_one_store_reach_the_other_once_and_in_order(dsn: str, follow_ms: int) -> None:
    """Beside replication each store also looks into the table, now and then, or all the time."""
    room = RoomBuilder("11")
    alice = "@alice:s1.test"
    room.start(alice)
    for number in range(EVENTS):
        room.message(alice, f"message {number}")
    config = replace(QUICK, follow_ms=follow_ms)
    async with (
        storage.open(dsn, server_name="s1.test", instance_name="main", config=config) as main,
        storage.open(dsn, server_name="s1.test", instance_name="worker", config=config) as worker,
        await Server(main).serve() as server,
        Client(worker, "127.0.0.1", server.port) as client,
    ):
        seen = Seen(worker.streams)
        await client.connected()
        results = [result for pdu in room.pdus for result in await main.append([pdu])]
        last = results[-1].stream_ordering
        assert last is not None
        await seen.reached("main", last, "events")
        facts = seen.facts["events", "main"]
        assert [fact.row[0] for fact in facts] == [result.event_id for result in results]
        assert facts == await worker.streams["events"].rows(0, last, 1_000, instance_name="main")
