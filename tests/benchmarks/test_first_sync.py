"""Our sides of the first syncs, at the smallest size: the example, and the call alone."""

import json
from pathlib import Path

import pytest
import uvloop

from benchmarks import first_sync
from benchmarks.harness import Bench, bench_server


@pytest.mark.slow
def test_our_sides_run(tmp_path: Path) -> None:
    with bench_server() as server:
        bench = Bench("first_sync", server, results_folder=tmp_path, quick=True)
        uvloop.run(first_sync.run(bench, alone=True))
    written = json.loads((tmp_path / "first_sync.quick.json").read_text())["results"]
    profiles = [one.name for one in first_sync.PROFILES]
    assert [*written["profiles"]] == profiles
    published = [one for one, told in written["profiles"].items() if told.pop("published", None)]
    assert published == [*first_sync.PUBLISHED] == profiles[:4]
    for one in written["profiles"].values():
        assert one.keys() == {"call", "ours"}
        for side in one.values():
            assert side["average_seconds"]["min"] > 0
            assert side["slowest_seconds"]["max"] >= side["average_seconds"]["max"]
    one, whole = (written["profiles"][profiles[at]]["ours"] for at in (0, 2))
    assert 1_000 < one["response_bytes"] < whole["response_bytes"]


def test_responses_that_differ_are_seen() -> None:
    def body(*ids: str, state: str = "$s") -> bytes:
        timeline = {"events": [{"event_id": one} for one in ids]}
        room = {"timeline": timeline, "state": {"events": [{"event_id": state}]}}
        return json.dumps({"rooms": {"join": {"!r": room}}}).encode()

    content = first_sync._content
    assert content(body("$a", "$b")) == {"!r": (["$a", "$b"], ["$s"])}
    assert content(body("$b", "$a")) != content(body("$a", "$b"))
    assert content(body("$a", state="$t")) != content(body("$a"))
