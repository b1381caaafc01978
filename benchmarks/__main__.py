"""`python -m benchmarks [names] [--quick] [--profile]`: run them all, or those named; results go to benchmarks/results."""

import argparse
import importlib
import logging
import pkgutil
import sys
from pathlib import Path

import uvloop

from benchmarks.harness import Bench, bench_server

NOT_BENCHMARKS = {"__main__", "harness"}


def names() -> list[str]:
    """The modules of this folder that measure something."""
    return sorted(module.name for module in pkgutil.iter_modules([str(Path(__file__).parent)]) if module.name not in NOT_BENCHMARKS)


def main() -> int:
    """Run what the command line names."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="name", help=f"of {', '.join(names())}; all if none is given")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds, to see that it works")
    parser.add_argument("--profile", action="store_true", help="show where the time goes in Python, instead of measuring")
    chosen = parser.parse_args()
    unknown = set(chosen.names) - set(names())
    if unknown:
        parser.error(f"no benchmark is named {', '.join(sorted(unknown))}")
    logging.basicConfig(level=logging.WARNING)
    with bench_server() as server:
        for name in chosen.names or names():
            module = importlib.import_module(f"benchmarks.{name}")
            bench = Bench(name, server, quick=chosen.quick, profile=chosen.profile)
            uvloop.run(module.run(bench))
    return 0


sys.exit(main())
