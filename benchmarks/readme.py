"""`python -m benchmarks readme`: write the tables of the comparison with Synapse.

They are made from the results. Each page has two markers: docs/benchmarks/synapse.md has all
tables between them, and the README one short table. Where growth was measured, its table is
written to docs/benchmarks/reads.md.
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from textwrap import fill
from typing import Any, Final

from benchmarks import growth
from benchmarks.figures import read
from benchmarks.harness import RESULTS, note

ROOT: Final = Path(__file__).parents[1]
README: Final = ROOT / "README.md"
PAGE: Final = ROOT / "docs" / "benchmarks" / "synapse.md"
BEGIN: Final = "<!-- from benchmarks/results/peer.json, by python -m benchmarks readme -->"
GROWTH_PAGE: Final = ROOT / "docs" / "benchmarks" / "reads.md"
GROWTH_BEGIN: Final = "<!-- from benchmarks/results/growth.json, by python -m benchmarks readme -->"
END: Final = "<!-- end -->"
WIDTH: Final = 100  # columns of a paragraph
SHORT_WRITES: Final = {
    "one at a time, small rooms": "messages, one at a time",
    "8 rooms at once": "messages, 8 rooms at once",
    "joins and leaves, one at a time": "joins and leaves, one at a time",
}
"""The writes that the README shows, and their names there."""
SHORT_READS: Final = {
    "incremental sync, 10 of 100 rooms changed": "sync, 10 of 100 rooms changed",
    "initial sync, 100 rooms, 20 events each": "first sync of 100 rooms",
    "a page of 100": "page of 100",
    "state ids with auth chain": "state ids, 5,000 members",
    "state before an old event": "state of 5,000 members at an old event",
}
"""The reads that the README shows, and their names there."""
CPU: Final = ("python_us_per_event", "postgres_us_per_event")
COUNTS: Final = ("statements_per_event", "transactions_per_event")
BYTES: Final = ("wal_bytes_per_event", "bytes_per_event")
GOALS: Final = {
    "one at a time, small rooms": "17",
    "8 rooms at once": "30",
    "batches of 100, one room": "12",
    "joins and leaves, one at a time": "18",
    "young rooms, one at a time": "10",
    "young rooms, a batch for each": "12",
    "incremental sync, 10 of 100 rooms changed": "10",
    "initial sync, 100 rooms, 20 events each": "15",
    "a page of 100": "15",
    "backfill of 100": "8",
    "auth chain of the current state": "8",
    "auth chain difference, old and current state": "14",
    "storing an event that merges two branches": "9",
}
"""The goals: how many times as fast."""
SIZE_GOALS: Final = {
    "one at a time, small rooms": "2.6",
    "small rooms": "3.2",
    "one at a time, room of 5,000 members": "3.7",
    "a large room": "5",
    "joins and leaves": "5.5",
}
"""The goals for tables and indexes: how many times less."""
LOG_GOALS: Final = {"small rooms": "3.5", "a large room": "5", "joins and leaves": "4"}
"""The goals for the WAL of whole rooms."""


ENDED: Final = (
    "The run was ended before its last questions: both sides were asked them, too, and agreed,"
    " but they are not measured here."
)
CROWDED_FROM: Final = 2  # a load of so many times the cores is more than the run itself causes
CROWDED: Final = (
    " Other programs shared the processors: a rate is a fraction of what it is alone,"
    " and a short answer waits for a processor longer than it works. "
    "Ratios of a round compare, those of CPU time best."
)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks readme", description=__doc__)
    parser.parse_args(arguments)
    if not (RESULTS / "peer.json").exists():
        parser.error("there is no benchmarks/results/peer.json: run the peer first, in full")
    document = read(RESULTS / "peer.json")
    for path, text in ((PAGE, rendered(document)), (README, short(document))):
        path.write_text(with_table(path.read_text(encoding="utf-8"), text), encoding="utf-8")
        note(f"written to {path}")
    if (RESULTS / "growth.json").exists():
        page = GROWTH_PAGE.read_text(encoding="utf-8")
        text = growth.rendered(read(RESULTS / "growth.json"))
        GROWTH_PAGE.write_text(with_table(page, text, GROWTH_BEGIN), encoding="utf-8")
        note(f"written to {GROWTH_PAGE}")
    return 0


def with_table(page: str, text: str, begin: str = BEGIN) -> str:
    """Return the page with this text between its markers."""
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(page)) != 1:
        raise ValueError("the page has not both markers, once each")
    return pattern.sub(lambda _: f"{begin}\n\n{text}\n\n{END}", page)


def short(document: dict[str, Any]) -> str:
    """Return the table of the README: events a second, milliseconds, and times as fast.

    Reads are compared with Synapse's caches emptied, and with its caches warm.
    """
    writes, reads = (document["results"][part] for part in ("writes", "reads"))
    lines = [
        "| | room-storage | Synapse | times as fast | its caches warm |",
        "|---|---|---|---|---|",
    ]
    for name, shown in SHORT_WRITES.items():
        rates = [
            f"{writes[name][side]['events_per_second']['median']:,.0f} events/s"
            for side in ("ours", "synapse")
        ]
        times = _times(writes[name]["ratio"]["events_per_second"])
        lines.append(_row([shown, *rates, times], ""))
    for name, shown in SHORT_READS.items():
        waits = [f"{_ms(reads[name][side])} ms" for side in ("ours", "synapse_cold")]
        times, warm = (_times(reads[name][key]) for key in ("ratio_cold", "ratio_warm"))
        lines.append(_row([shown, *waits, times], warm))
    return "\n".join([*lines, "", _where(document)])


def rendered(document: dict[str, Any]) -> str:
    """Return the text of the page: environment, writes, reads, limits."""
    results = document["results"]
    writes = results["writes"]
    parts = [_where(document), "### Storing", _writes(writes)]
    parts += ["### Time and round trips of an event, here / Synapse", _costs(writes)]
    parts += ["### Bytes of an event, here / Synapse", _bytes(writes)]
    if "disk" in results:  # a run that ended early lacks it, and what follows
        parts += ["### Bytes of an event in whole rooms, here / Synapse", _disk(results["disk"])]
    if "reads" in results:
        reads = results["reads"]
        parts += ["### Reading, Synapse's caches emptied", _first_reads(reads)]
        parts += ["### Reading again, Synapse's caches warm", _second_reads(reads)]
        parts += ["### Reading, against the bare statement", _limits_of_reads(reads)]
    parts.append(_limits(results) if "limits" in results else fill(ENDED, WIDTH))
    return "\n\n".join(parts)


def _where(document: dict[str, Any]) -> str:
    on, machine = document["on"], document["on"]["machine"]
    peer = document["results"]["peer"]["packages"]["matrix-synapse"]
    each = next(iter(document["results"]["writes"].values()))
    where = (
        f"Commit {on['commit']}, {document['when'][:10]}; Synapse {peer}; Python {on['python']},"
        f" {on['postgres']}; {machine['processor']}, "
        f"{machine['cores']} cores; the load was {machine['load'][1]:.0f}."
        f" {each['rounds']} rounds of {each['events_per_round']} events."
    )
    crowded = CROWDED if machine["load"][1] > CROWDED_FROM * machine["cores"] else ""
    return fill(where + crowded, WIDTH)


def _writes(writes: dict[str, Any]) -> str:
    rows = [
        [
            name,
            *(f"{one[side]['events_per_second']['median']:,.0f}" for side in ("ours", "synapse")),
            _ratio(one["ratio"]["events_per_second"]),
            GOALS.get(name, ""),
            f"{one['ratio']['cpu']['median']:.1f}",
            f"{one['share_of_limit']['median']:.0%}",
        ]
        for name, one in writes.items()
    ]
    columns = ["", "events/s", "Synapse", "times as fast, median (rounds)", "goal"]
    return _table([*columns, "times less CPU time", "share of the bare insert"], rows)


def _costs(writes: dict[str, Any]) -> str:
    rows = [
        [
            name,
            *(_pair(one, key, lambda side: f"{side['median']:,.0f}") for key in CPU),
            *(f"{one['ours'][key]:.2f} / {one['synapse'][key]:.1f}" for key in COUNTS),
        ]
        for name, one in writes.items()
    ]
    return _table(["", "Python us", "Postgres us", "statements", "transactions"], rows)


def _bytes(writes: dict[str, Any]) -> str:
    rows = []
    for name, one in writes.items():
        cells = [name, str(one["raw_bytes_per_event"])]
        for key in BYTES:
            times = one["synapse"][key] / one["ours"][key]
            cells += [_pair(one, key, "{:,}".format), f"{times:.1f}"]
        rows.append([*cells, SIZE_GOALS.get(name, "")])
    columns = ["", "raw", "WAL", "times less", "tables and indexes", "times less", "goal"]
    return _table(columns, rows)


def _disk(disk: dict[str, Any]) -> str:
    rows = []
    for name, one in disk.items():
        log, size = (_pair(one, key, "{:,}".format) for key in BYTES)
        cells = [f"{name}, {one['events']:,} events", str(one["raw_bytes_per_event"])]
        like = one["ratio"].get("like_for_like")  # earlier results lack it
        cells += [size, f"{one['ratio']['bytes']:.1f}", f"{like:.1f}" if like else ""]
        cells.append(SIZE_GOALS[name])
        rows.append([*cells, log, f"{one['ratio']['wal']:.1f}", LOG_GOALS[name]])
    columns = ["", "raw", "tables and indexes", "times less", "like for like", "goal"]
    columns += ["WAL", "times less", "goal"]
    return _table(columns, rows)


def _first_reads(reads: dict[str, Any]) -> str:
    rows = [
        [
            name,
            _ms(one["ours"]),
            _ms(one["synapse_cold"]),
            _ratio(one["ratio_cold"]),
            GOALS.get(name, ""),
            f"{one['cpu_ratio_cold']:.1f}",
        ]
        for name, one in reads.items()
    ]
    columns = ["", "ms", "Synapse", "times as fast", "goal", "times less CPU time"]
    return _table(columns, rows)


def _second_reads(reads: dict[str, Any]) -> str:
    rows = [
        [
            name,
            "" if one.get("ours_again") is None else _ms(one["ours_again"]),  # a merge is once
            _ms(one["synapse_warm"]),
            _ratio(one["ratio_warm"]),
            f"{one['cpu_ratio_warm']:.1f}",
        ]
        for name, one in reads.items()
    ]
    return _table(["", "ms", "Synapse", "times as fast", "times less CPU time"], rows)


def _limits_of_reads(reads: dict[str, Any]) -> str:
    sides = ("ours", "ours_again", "synapse_cold", "synapse_warm")
    rows = [
        [
            name,
            f"{one['share_of_limit']['median']:.0%}" if "share_of_limit" in one else "",
            *(f"{one[side]['statements']:.0f}" if one.get(side) else "" for side in sides),
        ]
        for name, one in reads.items()
    ]
    columns = ["", "share of the bare read", "statements", "again", "Synapse", "again"]
    return _table(columns, rows)


def _limits(results: dict[str, Any]) -> str:
    limits = results["limits"]
    page = results["reads"]["a page of 100"]["share_of_limit"]["median"]
    return fill(
        f"In the same run this Postgres took {limits['copy_rows_per_second']:,} rows a second by"
        f" COPY. A bare commit took {limits['commit_ms']:.2f} ms, a row by its key"
        f" {limits['point_select_ms']:.2f} ms, and 100 rows by index"
        f" {limits['index_range_100_ms']:.2f} ms. "
        f"A page takes {1 / page:.1f} times that of its own round (goal: 3).",
        WIDTH,
    )


def _table(columns: list[str], rows: list[list[str]]) -> str:
    lines = [_row(columns[:-1], columns[-1]), "|---" * len(columns) + "|"]
    return "\n".join([*lines, *(_row(row[:-1], row[-1]) for row in rows)])


def _pair(one: dict[str, Any], key: str, shown: Callable[[Any], str]) -> str:
    """Return a figure of both sides."""
    return f"{shown(one['ours'][key])} / {shown(one['synapse'][key])}"


def _row(cells: list[str], last: str) -> str:
    return f"| {' | '.join([*cells, last])} |"


def _ratio(spread: dict[str, float]) -> str:
    return f"{spread['median']:.1f} ({spread['min']:.1f} to {spread['max']:.1f})"


def _times(spread: dict[str, float]) -> str:
    times = spread["median"]
    return f"{times:.1f}" if times < 10 else f"{times:.0f}"


def _ms(side: dict[str, Any]) -> str:
    return f"{side['ms']['p50']:.2f}" if side["ms"]["p50"] < 10 else f"{side['ms']['p50']:,.0f}"
