"""`room-storage export-user`: all that one user has sent and could see, for the user."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from storage.cli.common import DsnOption, JsonOption, QuietOption, ServerNameOption, run_on_database
from storage.cli.output import print_values
from storage.database.connection import Database
from storage.maintenance.local_server import local_server_name
from storage.maintenance.user_export import UserExport, export_user
from storage.observability.counters import Report


def command(
    user: Annotated[
        str, typer.Argument(metavar="USER", help="@localpart:server", show_default=False)
    ],
    folder: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="A new folder.", show_default=False)
    ],
    *,
    dsn: DsnOption = None,
    server_name: ServerNameOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a user's data as pages to read and as lines for programs.

    Open index.html in a browser. It loads nothing from elsewhere.
    """

    async def work(database: Database, show: Report) -> UserExport:
        name = await local_server_name(database, server_name)
        return await export_user(database, user, folder, server_name=name, report=show)

    done = run_on_database(dsn, work, "no folder was written", quiet=quiet)
    print_values(asdict(done), as_json=as_json)
