"""Of results: what counts as worse, and the page with plots."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, report
from benchmarks.figures import FigureTable, figures, quantity, read, tables, unit_of
from benchmarks.report import verdict
from tests.cli.running import ROOT

MACHINE = {"processor": "one", "cores": 8, "memory_gb": 4, "load": [0.5, 0.5, 0.5]}
ON = {
    "commit": "abc",
    "changed_since": False,
    "python": "3.11.0",
    "postgres": "postgres 18",
    "machine": MACHINE,
}


def document(**results: Any) -> dict[str, Any]:
    return {
        "benchmark": "some",
        "quick": False,
        "when": "2026-01-01T00:00:00+00:00",
        "on": ON,
        "results": results,
    }


def spread(low: float, median: float, high: float) -> dict[str, float]:
    return {"median": median, "min": low, "max": high}


@pytest.mark.parametrize(
    "name, before, after, worse",
    [
        ("events_per_second", spread(90, 100, 110), spread(45, 50, 55), True),
        ("events_per_second", spread(90, 100, 110), spread(190, 200, 210), False),
        ("events_per_second", spread(90, 100, 110), spread(75, 80, 85), False),  # within a quarter
        # A itself was as low.
        (
            "events_per_second",
            spread(40, 100, 160),
            spread(45, 50, 55),
            False,
        ),
        # B reached it, too.
        (
            "events_per_second",
            spread(90, 100, 110),
            spread(45, 50, 105),
            False,
        ),
        ("python_us_per_event", spread(9, 10, 11), spread(19, 20, 21), True),
        ("python_us_per_event", spread(9, 10, 11), spread(4, 5, 6), False),
        (
            "batch_ms",
            {"p50": 1.0, "p95": 2.0, "p99": 3.0, "max": 4.0},
            {"p50": 1.3, "p95": 1.0, "p99": 1.0, "max": 1.3},
            True,
        ),
        (
            "batch_ms",
            {"p50": 1.0, "p95": 2.0, "p99": 3.0, "max": 4.0},
            {"p50": 1.2, "p95": 9.0, "p99": 9.0, "max": 9.0},
            False,
        ),
        ("statements_per_event", 2.0, 2.2, True),
        ("statements_per_event", 2.0, 2.05, False),
        ("statements_per_event", 2.0, 1.0, False),
        ("share_of_limit", spread(0.4, 0.5, 0.6), spread(0.1, 0.2, 0.3), True),
        ("ratio of bytes", 2.0, 1.5, True),
        ("synapse_ms", 1.0, 5.0, False),  # not ours
        ("limit_events_per_second", 5_000, 50, False),
        ("rooms", 5, 50, False),  # says nothing about better or worse
    ],
)
def test_worse_is_what_lies_beyond_the_noise(
    name: str, before: Any, after: Any, worse: bool
) -> None:
    found = compare.regressions(document(one={name: before}), document(one={name: after}))
    assert [old.path for old, _ in found] == ([("one", name)] if worse else [])


def test_rows_are_figures_by_what_they_are_about() -> None:
    rows = [
        {"what": "import", "seconds": 2.0},
        {"what": "import", "seconds": 3.0},
        {"what": " loading", "events_per_second": 5},
    ]
    found = figures(document(rows=rows, sizes=[1, 2], growth=[{"rows": 7}]))
    assert {path: one.value for path, one in found.items()} == {
        ("rows", "import", "seconds"): 2.0,
        ("rows", "import (2)", "seconds"): 3.0,
        ("rows", "loading", "events_per_second"): 5,
        ("growth", "(1)", "rows"): 7,
    }
    assert "loading" in report.page([document(rows=rows)])


def test_the_command_fails_on_a_regression_and_only_then(tmp_path: Path) -> None:
    before = document(one={"statements": 2, "ms": {"p50": 1.0, "p95": 1.0, "p99": 1.0, "max": 1.0}})
    after = copy.deepcopy(before)
    after["results"]["one"]["statements"] = 3
    other = before | {"benchmark": "other"}
    for name, one in (("a", before), ("b", after), ("c", other)):
        (tmp_path / f"{name}.json").write_text(json.dumps(one))

    def run(*names: str) -> subprocess.CompletedProcess[str]:
        files = [str(tmp_path / f"{name}.json") for name in names]
        return subprocess.run(
            [sys.executable, "-m", "benchmarks", "compare", *files],
            cwd=ROOT,
            check=False,
            capture_output=True,
            text=True,
        )

    same, worse, unlike = run("a", "a"), run("a", "b"), run("a", "c")
    assert (same.returncode, worse.returncode, unlike.returncode) == (0, 1, 2)
    assert "2 figures compared, 1 worse" in worse.stdout
    assert "one / statements" in worse.stdout
    assert "different benchmarks" in unlike.stderr


def test_the_page_has_a_plot_for_what_scenarios_share_and_escapes_names() -> None:
    named = {
        f"<{name}> & rooms": {"events_per_second": spread(1, 2, value)}
        for name, value in (("a", 4), ("b", 8))
    }
    made = report.page([document(**named)])
    assert "&lt;a&gt; &amp; rooms" in made
    assert "<a> & rooms" not in made
    [plot] = report.section(document(**named))["plots"]
    assert plot["title"] == "events per second"
    assert plot["direction"] == "more"
    assert [(bar.width, bar.low, bar.spread, bar.text) for bar in plot["bars"]] == [
        ("25.00", "12.50", "37.50", "2/s"),
        ("25.00", "12.50", "87.50", "2/s"),
    ]


def test_the_page_begins_with_the_verdict_and_six_comparisons() -> None:
    made = report.page([read(ROOT / "benchmarks/results/peer.json")])
    assert made.index('class="verdict"') < made.index('id="synapse"') < made.index('id="contents"')
    assert made.count('class="factor"') == 6
    assert "times less space" in made
    assert re.search(r'(src|href)="(https?:)?//', made) is None


def test_the_verdict_names_the_slower_scenarios() -> None:
    writes = {"one": {"ratio": {"events_per_second": spread(2, 3, 4)}}}
    reads = {"two": {"ratio_cold": spread(5, 6, 7), "ratio_warm": spread(0.5, 0.6, 0.7)}}
    assert verdict({"writes": writes, "reads": reads}) == (
        "In 2 of 3 comparisons this engine is faster than Synapse: 3 to 6 times,"
        " 4.50 times in the median. It is slower in: two, caches warm (0.60x)."
    )


@pytest.mark.parametrize(
    "path, value, text",
    [
        (("sync", "ms", "p50"), 2.7123, "2.71 ms"),
        (("sync", "ms"), 3654.2, "3.65 s"),
        (("python_us_per_event",), 642.4, "642 µs"),
        (("events_per_second",), 8037.4, "8,037/s"),
        (("bytes_per_event",), 1463, "1,463 B"),
        (("bytes_per_event",), 38_800_000, "38.8 MB"),
        (("share_of_limit",), 0.217, "22 %"),
        (("ratio", "events_per_second"), 14.2, "14.2x"),
        (("seconds",), 90, "1.50 min"),
        (("statements",), 1.0, "1"),
        (("statements_per_event",), 0.021, "0.021"),
    ],
)
def test_figures_have_units(path: tuple[str, ...], value: float, text: str) -> None:
    assert quantity(value, unit_of(path)) == text


def test_sides_stand_in_one_plot() -> None:
    told = {
        name: {side: {"statements": 1} for side in ("ours", "synapse_cold")}
        for name in ("sync", "page")
    }
    [(title, bars)] = report.shared(list(figures(document(reads=told)).values()))
    assert title == "reads: statements"
    assert [(label, side) for label, side, _ in bars] == [
        ("sync", "ours"),
        ("sync", "synapse_cold"),
        ("page", "ours"),
        ("page", "synapse_cold"),
    ]


def test_scenarios_with_the_same_figures_stand_in_one_table() -> None:
    percentiles = {"p50": 1.0, "p95": 2.0, "p99": 3.0, "max": 4.0}
    told = document(
        small={"ms": percentiles, "statements": 1},
        large={"ms": percentiles, "statements": 2},
        other={"events_per_second": spread(1, 2, 3)},
        longest_ms=7.0,
        disk={"rooms": {"bytes": 5}, "storm": {"bytes": 6}},
    )
    assert list(tables(told)) == [
        FigureTable(
            "",
            ["small", "large"],
            [["ms", "1 ms (p99 3 ms)", "1 ms (p99 3 ms)"], ["statements", "1", "2"]],
        ),
        FigureTable("other", [""], [["events per second", "2/s (1/s to 3/s)"]]),
        FigureTable("", [""], [["longest ms", "7 ms"]]),
        FigureTable("disk", ["rooms", "storm"], [["bytes", "5 B", "6 B"]]),
    ]
