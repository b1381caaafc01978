"""Our side of the comparison with Synapse, at the smallest size.

Both sides must have the same commands. These tests do not run the peer itself.
"""

import ast
import inspect
import json
import re
from pathlib import Path

import uvloop

from benchmarks import first_sync, peer
from benchmarks.harness import Bench, bench_server
from benchmarks.peers import merges, process, reads, whole, writes, young
from benchmarks.peers.writes import BATCH


def test_this_side_runs(tmp_path: Path) -> None:
    with bench_server() as server:
        bench = Bench("peer", server, results_folder=tmp_path, quick=True, events=16)
        uvloop.run(peer.run(bench, alone=True))
    told = bench.results["writes"]
    assert set(told) == {
        scenario.name for scenario in (*writes.scenarios(bench), *young.scenarios(bench))
    }
    for one in told.values():
        own = one["ours"]
        assert own["events_per_second"]["min"] > 0
        assert 0 < own["statements_per_event"] <= 6
        assert own["wal_bytes_per_event"] > one["raw_bytes_per_event"] / 2
        assert own["python_us_per_event"]["min"] > 0
        assert own["postgres_us_per_event"]["min"] > 0
        assert one["share_of_limit"]["min"] > 0
    assert (
        told["8 rooms at once"]["ours"]["statements_per_event"]
        < told["one at a time, small rooms"]["ours"]["statements_per_event"]
    )
    assert (tmp_path / "peer.quick.json").exists()


def test_what_is_asked_of_the_peer_is_what_its_driver_has() -> None:
    [driver] = [
        node
        for node in ast.parse(process.DRIVER.read_text(encoding="utf-8")).body
        if getattr(node, "name", "") == "Peer"
    ]
    assert isinstance(driver, ast.ClassDef)
    methods = {
        node.name: [one.arg for one in node.args.args[1:]]
        for node in driver.body
        if isinstance(node, ast.AsyncFunctionDef)
    }
    source = "".join(
        map(inspect.getsource, (first_sync, merges, peer, process, reads, whole, writes, young))
    )
    asked = set(re.findall(r"\.ask\(\"(\w+)\"", source))
    assert {
        "settle",
        "still",
        "room",
        "load",
        "persist",
        "register",
        "log_in",
        "forget",
        "token",
        "ask",
        "versions",
    } == asked
    assert asked <= methods.keys()
    pairs = re.findall(r"ReadPair\([^\"]*?\"(\w+)\",", source)
    assert len(pairs) >= 8
    assert {f"_ask_{what}" for what in pairs} <= methods.keys()


def test_each_client_gets_its_rooms_in_turn() -> None:
    scenario = writes.PeerScenario("", 0, rooms=4, batch=2, clients=2, how="single", base=1)
    rooms = [
        writes.SentRoom(str(number), "11", [b"%d %d" % (number, at) for at in range(4)])
        for number in range(4)
    ]
    assert writes.clients_of(scenario, rooms, 1, 3) == [
        [[b"0 2", b"2 2"], [b"0 3", b"2 3"]],
        [[b"1 2", b"3 2"], [b"1 3", b"3 3"]],
    ]


def test_a_storm_is_sent_whole_and_in_order() -> None:
    room = whole.storm(60)
    assert [pdu for batch in room.batches() for pdu in batch] == room.pdus
    assert max(map(len, room.batches())) == BATCH
    told = [json.loads(pdu)["content"].get("membership") for pdu in room.pdus]
    assert told.count("leave") == 60
    assert told[-4:] == ["join", "leave", "join", "leave"]
