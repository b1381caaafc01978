"""`room-storage rebuild-visibility`: rebuild a room, with its visibility, from its events."""

from typing import Annotated

import typer

from storage.cli.common import (
    DsnOption,
    JsonOption,
    ProgressDisplay,
    QuietOption,
    ServerNameOption,
    maintained,
)
from storage.cli.interrupt import UNCHANGED, run
from storage.cli.output import print_values
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
    with ProgressDisplay(quiet=quiet) as show:
        run(_rebuild(dsn, server_name, room_id, show), UNCHANGED)
    print_values({"rebuilt": room_id}, as_json=as_json)


async def _rebuild(dsn: str | None, server_name: str | None, room_id: str, show: Report) -> None:
    async with maintained(dsn) as database:
        name = await local_server_name(database, server_name)
        await rebuild(database, room_id, server_name=name, report=show)
