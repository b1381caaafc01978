"""`python -m benchmarks compare A.json B.json`: report regressions from A to B beyond the noise.

The exit code is 1 if there are any. A median over rounds is worse under three conditions: it is
outside the spread of A's rounds, B's rounds do not reach A's median, and it is worse by more than
`--noise` (a quarter). Counts, such as statements and bytes, are worse by more than a twentieth.
Figures of one round and medians of many have no spread, so the noise alone decides. Compare results
of one machine, both quick or both full.
"""

import argparse
from pathlib import Path
from typing import Any, Final

from benchmarks.figures import Figure, figures, read
from benchmarks.harness import note, show

NOISE: Final = 0.25
COUNTED_NOISE: Final = 0.05


def main(arguments: list[str]) -> int:
    """Compare two files."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks compare", description=__doc__)
    parser.add_argument("before", type=Path, metavar="A.json")
    parser.add_argument("after", type=Path, metavar="B.json")
    parser.add_argument(
        "--noise",
        type=float,
        default=NOISE,
        metavar="SHARE",
        help="by how much a timing may get worse (0.25)",
    )
    chosen = parser.parse_args(arguments)
    before, after = read(chosen.before), read(chosen.after)
    if (unlike := unlikeness(before, after)) is not None:
        parser.error(unlike)
    for warning in warnings(before, after):
        note(warning)
    worse = regressions(before, after, chosen.noise)
    shared = figures(before).keys() & figures(after).keys()
    if worse:
        rows = [
            [
                " / ".join(old.path),
                f"{old.value:,.4g}",
                f"{new.value:,.4g}",
                f"{_change(old, new):+.0%}",
            ]
            for old, new in worse
        ]
        show("worse beyond the noise", ["", str(chosen.before), str(chosen.after), "change"], rows)
    note(f"{len(shared)} figures compared, {len(worse)} worse")
    return 1 if worse else 0


def unlikeness(before: dict[str, Any], after: dict[str, Any]) -> str | None:
    """Return why the two cannot be compared, if so."""
    if before["benchmark"] != after["benchmark"]:
        return f"of different benchmarks: {before['benchmark']} and {after['benchmark']}"
    if before["quick"] != after["quick"]:
        return "one is of a quick run, the other of a full one"
    return (
        None if figures(before).keys() & figures(after).keys() else "they have no figure in common"
    )


def warnings(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the reasons for which the comparison is weak."""
    old, new = before["on"]["machine"], after["on"]["machine"]
    found = [
        f"{name}: {old[name]} and {new[name]}"
        for name in ("processor", "cores")
        if old[name] != new[name]
    ]
    loads = [
        (name, one["load"][0], one["cores"]) for name, one in (("first", old), ("second", new))
    ]
    found += [
        f"the {name} ran at a load of {load} on {cores} cores"
        for name, load, cores in loads
        if load > cores / 2
    ]
    lost = figures(before).keys() - figures(after).keys()
    return found + (
        [f"{len(lost)} figures of the first are not in the second, such as {' / '.join(min(lost))}"]
        if lost
        else []
    )


def regressions(
    before: dict[str, Any], after: dict[str, Any], noise: float = NOISE
) -> list[tuple[Figure, Figure]]:
    """Return the regressions, the worst first."""
    old, new = figures(before), figures(after)
    pairs = [(old[path], new[path]) for path in old.keys() & new.keys() if old[path].ours]
    return sorted(
        (pair for pair in pairs if _worse(*pair, noise)),
        key=lambda pair: (-abs(_change(*pair)), pair[0].path),
    )


def _worse(old: Figure, new: Figure, noise: float) -> bool:
    by = -_change(old, new) * old.better
    below, above = (
        new.value < old.low and new.high < old.value,
        new.value > old.high and new.low > old.value,
    )
    return (below if old.better > 0 else above) and by > (noise if old.timed else COUNTED_NOISE)


def _change(old: Figure, new: Figure) -> float:
    return (new.value - old.value) / old.value if old.value else float(new.value > 0)
