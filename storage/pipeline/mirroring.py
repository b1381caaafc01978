"""`mirror` and `mirrored`: tables that stay true, for those who count and learn.

Needs the extra `lake`. The work is in `storage.pipeline.lake`, which is imported when it is called.
"""

import importlib
import threading
from collections.abc import Callable
from datetime import datetime
from typing import Any

from pyspark.sql import DataFrame, SparkSession

from storage.errors import ExtraMissing, InputError
from storage.pipeline.lake.tables import TABLES, chosen_tables


def mirror(
    spark: SparkSession | None,
    dsn: str,
    path: str,
    tables: tuple[str, ...] = ("all",),
    *,
    once: bool = False,
    compare: bool = False,
    every_s: float = 1.0,
    rooms_every_s: float = 30.0,
    keep_hours: int = 168,
    batch: int = 200_000,
    tasks: int = 8,
    stop: threading.Event | None = None,
    report: Callable[[Any], None] = lambda _: None,
) -> None:
    """Mirror a store in the folder ``path`` as tables of Delta Lake, until ``stop`` is set.

    ``tables``: "events", "state_changes", "memberships", "visibility", "rooms" or "all"; "rooms" is
    always among them. With ``once``, end when they have what the store has now. Run one mirror of a
    folder at a time, and run it again after an interruption: each commit has the position up to
    which the table has read, so it misses and repeats nothing. ``compare``: first compare all rows
    with the store, as after a restore of the database. ``every_s``: seconds between the beginnings
    of two rounds; ``rooms_every_s``: of two that read memberships, visibility and rooms.
    ``keep_hours``: so long old versions stay. ``batch``: new events of a commit, at most. From
    20,000 on, ``tasks`` of Spark read them; without ``spark``, this process does. ``report`` gets
    each `storage.pipeline.lake.rounds.MirrorPass`.

    Raise `ExtraMissing`, `InputError` for a folder of another database or version, `ResyncNeeded`
    after a restore of the database, or `DatabaseError`.
    """
    if min(every_s, rooms_every_s, keep_hours) < 0 or min(batch, tasks) < 1:
        raise InputError("every_s, rooms_every_s and keep_hours are 0 or more; batch, tasks 1")
    names = tuple(table.name for table in chosen_tables(tables))
    lake_module("rounds").run(
        spark,
        dsn,
        path,
        names,
        once=once,
        compare=compare,
        every_s=every_s,
        rooms_every_s=rooms_every_s,
        keep_hours=keep_hours,
        batch=batch,
        tasks=tasks,
        stop=stop or threading.Event(),
        report=report,
    )


def mirrored(
    spark: SparkSession, path: str, table: str, *, version: int | datetime | None = None
) -> DataFrame:
    """Return a table of the mirror in the folder ``path`` as a data frame.

    ``version``: a number or a time, for the table as it was then. Raise `InputError` where there is
    none, or none any more, or `ExtraMissing`.
    """
    chosen = next(
        (lake_table for lake_table in chosen_tables((table,)) if lake_table.name == table), None
    )
    if chosen is None:
        raise InputError(f"a data frame has one table: give one of {', '.join(TABLES)}")
    frame: DataFrame = lake_module("questions").frame(spark, path, chosen, version)
    return frame


def require_lake() -> None:
    """Raise `ExtraMissing` unless the extra `lake` is installed."""
    try:
        importlib.import_module("deltalake")
    except ModuleNotFoundError:
        raise ExtraMissing("a mirror", "lake") from None


def lake_module(name: str) -> Any:
    """Import a module of `storage.pipeline.lake`. Raise `ExtraMissing`."""
    require_lake()
    return importlib.import_module(f"storage.pipeline.lake.{name}")
