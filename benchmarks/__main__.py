"""`python -m benchmarks [names] [--quick] [--profile]`: run benchmarks.

Without names, all run except peer, peer_disk and first_sync.
Results go to benchmarks/results.
Commands on results: `python -m benchmarks report` (a page with plots), `compare A.json B.json`,
`readme` (the tables of the peer).
"""

import argparse
import importlib
import sys
from pathlib import Path

import uvloop

from benchmarks import compare, readme, report
from benchmarks.harness import RESULTS, Bench, bench_server, whole_run

# these install another engine on first use
BY_NAME_ONLY = {"peer", "peer_disk", "first_sync"}
OF_RESULTS = {"report": report.main, "compare": compare.main, "readme": readme.main}


def names() -> list[str]:
    """Return the modules of this folder that measure something: those with a function `run`."""
    return sorted(
        path.stem
        for path in Path(__file__).parent.glob("*.py")
        if "\nasync def run(" in path.read_text(encoding="utf-8")
    )


def main() -> int:
    """Run the benchmarks or the command named on the command line."""
    if sys.argv[1:2] and sys.argv[1] in OF_RESULTS:
        return OF_RESULTS[sys.argv[1]](sys.argv[2:])
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "names",
        nargs="*",
        metavar="name",
        help=f"of {', '.join(names())}; default: all but {', '.join(sorted(BY_NAME_ONLY))}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small sizes and few rounds, to check that it works"
    )
    parser.add_argument(
        "--events",
        type=int,
        metavar="N",
        help="events per round (peer only)",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="profile Python instead of measuring",
    )
    parser.add_argument(
        "--results",
        type=Path,
        default=RESULTS,
        metavar="FOLDER",
        help="where results go (benchmarks/results)",
    )
    chosen = parser.parse_args()
    unknown = set(chosen.names) - set(names())
    if unknown:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    with bench_server() as server:
        for name in chosen.names or [name for name in names() if name not in BY_NAME_ONLY]:
            module = importlib.import_module(f"benchmarks.{name}")
            bench = Bench(
                name,
                server,
                results_folder=chosen.results,
                quick=chosen.quick,
                profile=chosen.profile,
                events=chosen.events,
            )
            with whole_run(name, server):
                uvloop.run(module.run(bench))
            if bench.results:
                bench.write()
                getattr(module, "summary", bench.show)(bench.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
