"""The comparison with Synapse in short: a verdict, and six scenarios with both sides."""

from statistics import median
from typing import Any, Final, NamedTuple

from benchmarks.numbers import number, quantity


class Side(NamedTuple):
    """One engine in a scenario: a median over rounds, and the extremes."""

    value: float
    low: float
    high: float


class Comparison(NamedTuple):
    """One scenario: ``factor`` is how many times as fast, or as small, this engine is."""

    title: str
    what: str
    unit: str
    more_is_better: bool
    ours: Side
    synapse: Side
    factor: float


STORED: Final = {
    "one at a time, small rooms": "Store events one at a time",
    "8 rooms at once": "Store events of 8 rooms at once",
    "batches of 100, one room": "Store batches of 100 events",
}
READ: Final = {
    "incremental sync, 10 of 100 rooms changed": "Sync: 10 of 100 rooms have changed",
    "a page of 100": "Read a page of 100 messages",
}
SIZES: Final = {"small rooms": "Disk: small rooms, per event"}


def comparisons(results: dict[str, Any]) -> list[Comparison]:
    """Return the six comparisons; fewer for a run that ended early."""
    found = [_stored(title, results["writes"][name]) for name, title in STORED.items()]
    if "reads" in results:
        found += [_read(title, results["reads"][name]) for name, title in READ.items()]
    if "disk" in results:
        found += [_size(title, results["disk"][name]) for name, title in SIZES.items()]
    return found


def _stored(title: str, one: dict[str, Any]) -> Comparison:
    ours, synapse = (_side(one[name]["events_per_second"]) for name in ("ours", "synapse"))
    factor = one["ratio"]["events_per_second"]["median"]
    return Comparison(title, "events per second", "/s", True, ours, synapse, factor)


def _read(title: str, one: dict[str, Any]) -> Comparison:
    ours, synapse = (_answers(one[name]["ms"]) for name in ("ours", "synapse_cold"))
    what = "time of the first response, caches of the engine emptied"
    return Comparison(title, what, "ms", False, ours, synapse, one["ratio_cold"]["median"])


def _size(title: str, one: dict[str, Any]) -> Comparison:
    ours, synapse = (Side(one[n]["bytes_per_event"], *[one[n]["bytes_per_event"]] * 2)
                     for n in ("ours", "synapse"))  # fmt: skip
    what = "tables and indexes, per event"
    return Comparison(title, what, "B", False, ours, synapse, one["ratio"]["bytes"])


def _side(spread: dict[str, float]) -> Side:
    return Side(spread["median"], spread["min"], spread["max"])


def _answers(percentiles: dict[str, float]) -> Side:
    return Side(percentiles["p50"], percentiles["p50"], percentiles["p95"])


def factors(results: dict[str, Any]) -> dict[str, float]:
    """Return how many times as fast this engine is, for each scenario of storing and reading."""
    found = {
        name: one["ratio"]["events_per_second"]["median"] for name, one in results["writes"].items()
    }
    for name, one in results.get("reads", {}).items():
        found[name] = one["ratio_cold"]["median"]
        found[f"{name}, caches warm"] = one["ratio_warm"]["median"]
    return found


def verdict(results: dict[str, Any]) -> str:
    """Return the result of the comparison in two or three sentences."""
    found = factors(results)
    faster = {name: factor for name, factor in found.items() if factor > 1}
    text = (
        f"In {len(faster)} of {len(found)} comparisons this engine is faster than Synapse: "
        f"{number(min(faster.values()))} to {number(max(faster.values()))} times,"
        f" {number(median(faster.values()))} times in the median."
    )
    slower = {name: factor for name, factor in found.items() if factor <= 1}
    if slower:
        listed = ", ".join(f"{name} ({quantity(factor, 'x')})" for name, factor in slower.items())
        text += f" It is slower in: {listed}."
    if "disk" in results:
        sizes = [one["ratio"]["bytes"] for one in results["disk"].values()]
        text += (
            f" Its tables and indexes take {number(min(sizes))} to {number(max(sizes))} times"
            " less space."
        )
    return text
