"""A continuous mirror whose every pass is read by tasks of Spark, to be killed: DSN FOLDER MASTER.

It prints a line for each commit.
"""

import sys

from storage.pipeline import mirror
from storage.pipeline.lake import bulk, event_pass
from storage.pipeline.lake.rounds import MirrorPass
from storage.pipeline.session import session
from tests.pipeline.import_process import SETTINGS


def report(made: MirrorPass) -> None:
    sys.stdout.write(f"{made.table} {made.version} {made.rows}\n")
    sys.stdout.flush()


def main(dsn: str, folder: str, master: str) -> None:
    event_pass.WIDE, bulk.FEW_ROOMS = 5, 1  # type: ignore[misc]  # few rows are many here
    settings = {**SETTINGS, "spark.ui.showConsoleProgress": "false"}
    with session(master, settings, name="to be killed") as spark:
        mirror(
            spark,
            dsn,
            folder,
            every_s=0.05,
            rooms_every_s=0.3,
            batch=60,
            tasks=2,
            report=report,
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
