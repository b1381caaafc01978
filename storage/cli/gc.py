"""`room-storage gc`: delete state groups that nothing refers to any more, and other old rows."""

from typing import NamedTuple

import typer

from storage.cli.common import DsnOption, JsonOption, QuietOption, RoomsOption, run_on_database
from storage.cli.interrupt import AGAIN
from storage.cli.output import amount, print_json, print_rows
from storage.database.connection import Database
from storage.maintenance.expiry import delete_old_connections, delete_old_transactions
from storage.maintenance.state_group_gc import Collected, collect_all, collect_rooms
from storage.observability.counters import Report
from storage.persist.partial_marks import drop_lost_marks


def command(
    dsn: DsnOption = None,
    *,
    room: RoomsOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Delete the state groups that no event and no room refers to.

    Also delete old transaction ids, connections of sliding sync that are not in use, and marks of
    joins that were never stored because a process was killed.

    With --room only state groups. Works in bounded batches while servers run.
    """
    collected, old = run_on_database(
        dsn, lambda database, show: _collect(database, room, show), AGAIN, quiet=quiet
    )
    freed = sum(room_result.state_groups for room_result in collected)
    if as_json:
        rooms = [room_result._asdict() for room_result in collected]
        print_json({"state_groups": freed, "rooms": rooms, **old._asdict()})
        return
    print_rows(
        "Freed",
        ["room", "state groups"],
        [(room_result.room_id, room_result.state_groups) for room_result in collected],
        as_json=False,
    )
    typer.echo(f"{amount(freed, 'state group')} freed")
    if room is None:
        typer.echo(f"{amount(old.transactions, 'old transaction id')} deleted")
        typer.echo(f"{amount(old.connections, 'unused connection')} deleted")
        if old.marks:
            typer.echo(f"{amount(old.marks, 'mark')} of joins that were never stored deleted")


class OldRows(NamedTuple):
    """The numbers of deleted rows: transaction ids, connections of sliding sync, marks of joins."""

    transactions: int
    connections: int
    marks: int


async def _collect(
    database: Database, rooms: list[str] | None, show: Report
) -> tuple[list[Collected], OldRows]:
    if rooms is None:
        old = OldRows(
            await delete_old_transactions(database),
            await delete_old_connections(database),
            len(await drop_lost_marks(database)),
        )
        return [collected async for collected in collect_all(database, report=show)], old
    return await collect_rooms(database, rooms, report=show), OldRows(0, 0, 0)
