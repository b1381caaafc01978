"""`room-storage rebuild-visibility`: rebuild the visibility of a room from its states."""

from typing import Annotated

import typer

from storage.cli.common import DsnOption, JsonOption, ServerNameOption, print_values
from storage.cli.interrupt import UNCHANGED, run
from storage.cli.maintaining import maintained
from storage.maintenance.local_server import local_server_name
from storage.maintenance.repair import rebuild_visibility


def command(
    room_id: Annotated[
        str, typer.Argument(metavar="ROOM_ID", help="The room.", show_default=False)
    ],
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    *,
    as_json: JsonOption = False,
) -> None:
    """Rebuild the visibility table of a room from its states. Its writers wait meanwhile."""
    run(_rebuild(dsn, server_name, room_id), UNCHANGED)
    print_values({"rebuilt": room_id}, as_json=as_json)


async def _rebuild(dsn: str | None, server_name: str | None, room_id: str) -> None:
    async with maintained(dsn) as database:
        await rebuild_visibility(
            database, room_id, server_name=await local_server_name(database, server_name)
        )
