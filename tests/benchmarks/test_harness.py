"""The benchmarks' own arithmetic, and that they run."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import harness
from benchmarks.__main__ import names
from tests.cli.running import ROOT, environment
from tests.long_run import long_run


def test_percentiles_and_spreads() -> None:
    assert harness.percentiles([value / 1_000 for value in range(1, 101)], factor=1_000) == {
        "p50": 51,
        "p95": 96,
        "p99": 100,
        "max": 100,
    }
    assert harness.percentiles([5.0]) == {"p50": 5, "p95": 5, "p99": 5, "max": 5}
    assert harness.spread([3.0, 1.0, 2.0]) == {"median": 2, "min": 1, "max": 3}


def hot() -> int:
    return sum(number % 7 for number in range(3_000_000))


def test_a_profile_names_what_is_hot() -> None:
    sampler = harness.Sampler()
    with sampler.running():
        hot()
    told = harness.hot_functions(sampler, 1)
    assert "hot.<locals>.<genexpr>" in told.splitlines()[2]
    # The last sample may come after the work.
    assert sampler.own.total() >= sampler.together[hot.__code__] > 0.8 * sampler.own.total()


@pytest.mark.slow
@long_run
def test_append_runs_and_says_on_what(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "append", "--quick", "--results", str(tmp_path)],
        cwd=ROOT,
        env=environment(),
        check=False,
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert "append" in names()
    assert re.search(
        r"^data: \S+/server \(gone at the end; STORAGE_BENCH_DATA=", done.stdout, re.MULTILINE
    )
    told = json.loads((tmp_path / "append.quick.json").read_text())
    assert {"commit", "python", "postgres", "packages", "machine"} <= told["on"].keys()
    assert told["results"].keys() >= {"one room, 1", "50 rooms, 100", "8 rooms at once, 1"}
    for one in told["results"].values():
        assert one["round_trips_per_batch"] <= 6
        assert min(one["events_per_second"].values()) > 0


def test_an_unknown_one_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks", "nonsense"],
        cwd=ROOT,
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert "nonsense" in done.stderr


def test_changed_code_is_noticed(tmp_path: Path) -> None:
    """Also from a folder below that of the repository; results are no code."""
    for name in ("storage", "benchmarks/results"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "storage" / "a.py").touch()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "--quiet"], ["add", "."], ["commit", "--quiet", "-m", "a"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "benchmarks" / "results" / "a.json").touch()
    assert not harness.has_changed(tmp_path / "benchmarks")
    (tmp_path / "storage" / "a.py").write_text("changed")
    assert harness.has_changed(tmp_path / "benchmarks")
