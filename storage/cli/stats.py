"""`room-storage stats`: count the contents of the store and measure its size on disk."""

import time
from collections.abc import Sequence
from typing import Annotated, Any, Final, NamedTuple

import typer

from storage.cli.common import DsnOption, JsonOption, described, maintained
from storage.cli.interrupt import run
from storage.cli.output import amount, print_json, print_rows, print_values
from storage.config import Config
from storage.database.connection import Connection
from storage.database.sizes import TableSize, table_sizes
from storage.maintenance.cold_archive.sweep import DAYS, ArchiveSizes, archive_sizes
from storage.maintenance.growth import (
    EVENTS_MIN,
    Forecast,
    Growth,
    forecast,
    full_days,
    growth,
    received_days,
)
from storage.maintenance.reencode import StoredForms, stored_forms
from storage.maintenance.totals import LargeState, StoreCounts, counts, largest_states

GROWTH_METHOD: Final = """\
Growth is the events received in a period, times the bytes of all tables and indexes by event.
An import counts on its day. Purged events do not count. In a younger store the rate is that of its
age, of one day at least. The forecast continues the median day of the last 30.
"""
TOO_YOUNG: Final = (
    "Forecast: not enough history. It needs a full day after the day of the first event,"
    f" and {EVENTS_MIN:,} events.\n"
)


class Stats(NamedTuple):
    """Everything that the command shows."""

    counts: StoreCounts
    tables: list[TableSize]
    states: list[LargeState]
    growth: list[Growth]
    forecast: list[Forecast]
    forms: StoredForms
    archive: ArchiveSizes


def command(
    dsn: DsnOption = None,
    *,
    top: Annotated[
        int, typer.Option(min=0, max=10_000, help="The number of largest states to show.")
    ] = 10,
    as_json: JsonOption = False,
) -> None:
    """Show rooms, events, sizes per table and event, growth, and the largest states."""
    stats = run(_stats(dsn, top))
    database = described(dsn, Config.from_env().database_schema)
    if as_json:
        print_json({"database": database} | as_document(stats))
        return
    print_values({"database": database} | overview(stats), as_json=False)
    print_rows("On disk, in bytes", *table_rows(stats), as_json=False)
    print_growth(stats)
    states = [tuple(state) for state in stats.states]
    print_rows(
        "Largest states", ["room", "version", "entries", "joined", "groups"], states, as_json=False
    )


async def read_stats(conn: Connection, top: int = 10) -> Stats:
    """Return the statistics of `room-storage stats`."""
    totals, tables = await counts(conn), await table_sizes(conn)
    an_event, now_ms = bytes_per_event(totals, tables), time.time_ns() // 1_000_000
    received = await received_days(conn, now_ms)
    grown, days = growth(received, an_event, now_ms), full_days(received, now_ms)
    expected = forecast(totals.database_bytes, an_event, totals.events, days)
    forms = await stored_forms(conn)
    archive = await archive_sizes(conn)
    return Stats(totals, tables, await largest_states(conn, top), grown, expected, forms, archive)


def bytes_per_event(totals: StoreCounts, tables: list[TableSize]) -> float:
    return sum(table.total_bytes for table in tables) / max(totals.events, 1)


def as_document(stats: Stats) -> dict[str, Any]:
    """Return the document for programs, with the names of the row types."""
    events = stats.counts.events
    return {
        "counts": stats.counts._asdict()
        | {"bytes_per_event": _per(stats.counts.database_bytes, events)},
        "tables": [
            table._asdict() | {"bytes_per_event": _per(table.total_bytes, events)}
            for table in stats.tables
        ],
        "growth": [period._asdict() for period in stats.growth],
        "forecast": [expected._asdict() for expected in stats.forecast],
        "stored_forms": stats.forms._asdict() | {"saving": stats.forms.saving},
        "archive": stats.archive._asdict(),
        "largest_states": [state._asdict() for state in stats.states],
    }


def overview(stats: Stats) -> dict[str, object]:
    """Return the counts, for people."""
    totals = stats.counts
    values: dict[str, object] = {
        name.replace("_", " "): f"{value:,}" for name, value in totals._asdict().items()
    }
    values["json bytes"] = (  # as stored
        f"{totals.json_bytes:,}, {_per(totals.json_bytes, totals.events):,} an event"
    )
    values["database bytes"] = (
        f"{totals.database_bytes:,}, {_per(totals.database_bytes, totals.events):,} an event"
    )
    return (
        values
        | forms_overview(stats.forms, totals.events - stats.archive.events)
        | {"archive": archive_overview(stats.archive)}
    )


def archive_overview(sizes: ArchiveSizes) -> str:
    """Return what is archived, and what archiving would save, for people."""
    return (
        f"{amount(sizes.events, 'event')} in {amount(sizes.packs, 'pack')} of"
        f" {sizes.pack_bytes:,} bytes; {sizes.archivable:,} others older than {DAYS} days"
        f" would take {sizes.saving:,} bytes out of the table"
    )


def forms_overview(forms: StoredForms, events: int) -> dict[str, object]:
    """Return what the stored forms take and save, for people; ``events``: those of the table."""
    if not forms.events:
        return {}
    share = round(100 * forms.plain_events / forms.events)
    return {
        "received bytes": f"about {forms.received_bytes:,} an event, stored in"
        f" {forms.stored_bytes:,}; {share} % of events are not encoded"
        f" (a sample of {forms.events:,})",
        "re-encoding": f"saves about {round(forms.saving * events):,} bytes,"
        f" {forms.saving:,} an event",
    }


def table_rows(stats: Stats) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return columns and rows: sizes by table.

    Tables below a hundredth of the total share one line.
    """
    whole = sum(table.total_bytes for table in stats.tables)
    large = [table for table in stats.tables if table.total_bytes * 100 >= whole]
    small = [table for table in stats.tables if table.total_bytes * 100 < whole]
    rows: list[tuple[str, Sequence[int]]] = [(table.table_name, table[2:]) for table in large]
    if small:
        rows.append(
            (
                f"{len(small)} others",
                [sum(column) for column in zip(*(table[2:] for table in small), strict=True)],
            )
        )
    cells = [
        (name, *(f"{size:,}" for size in sizes), f"{_per(sizes[-1], stats.counts.events):,}")
        for name, sizes in rows
    ]
    return ["table", "heap", "large values", "indexes", "together", "an event"], cells


def print_growth(stats: Stats) -> None:
    """Print the growth of each period, and the forecast, for people."""
    periods = [
        (_days("last", period.days), *(f"{value:,}" for value in period[2:]))
        for period in stats.growth
    ]
    columns = ["period", "events", "events a day", "bytes a day"]
    print_rows("Growth", columns, periods, as_json=False)
    sizes = [
        (_days("in", expected.days), f"{expected.database_bytes:,}") for expected in stats.forecast
    ]
    print_rows("Forecast", ["database", "bytes"], sizes, as_json=False)
    if not sizes:
        typer.echo(TOO_YOUNG)
    typer.echo(GROWTH_METHOD)


def _days(word: str, days: int) -> str:
    return f"{word} {days} days" if days > 1 else f"{word} day"


def _per(size: int, events: int) -> float:
    return round(size / events, 1) if events else 0.0


async def _stats(dsn: str | None, top: int) -> Stats:
    async with (
        maintained(dsn) as database,
        database.transaction(isolation="repeatable_read", readonly=True) as conn,
    ):
        return await read_stats(conn, top)
