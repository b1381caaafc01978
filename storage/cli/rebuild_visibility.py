"""`room-storage rebuild-visibility`: rebuild a room, with its visibility, from its events."""

from typing import Annotated

import typer

from storage.cli.common import DsnOption, JsonOption, QuietOption, ServerNameOption, run_on_database
from storage.cli.interrupt import UNCHANGED
from storage.cli.output import print_values
from storage.database.connection import Database
from storage.maintenance.local_server import local_server_name
from storage.observability.counters import Report
from storage.rebuild import rebuild


def command(
    room_id: Annotated[
        str, typer.Argument(metavar="ROOM_ID", help="The room.", show_default=False)
    ],
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    *,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Rebuild the derived data of a room from its events. Its writers wait at the end alone."""

    async def work(database: Database, show: Report) -> None:
        name = await local_server_name(database, server_name)
        await rebuild(database, room_id, server_name=name, report=show)

    run_on_database(dsn, work, UNCHANGED, quiet=quiet)
    print_values({"rebuilt": room_id}, as_json=as_json)
