"""`room-storage forget-user`: erase a user who asked to be forgotten."""

import time
from typing import Annotated

import typer

from storage import arguments as args
from storage.cli.common import DsnOption, JsonOption, print_json
from storage.cli.interrupt import AGAIN, run
from storage.cli.maintaining import maintained
from storage.persist.user_erasure import erase_user, restore_user


def command(
    user: Annotated[
        str, typer.Argument(metavar="USER", help="@localpart:server", show_default=False)
    ],
    *,
    undo: Annotated[
        bool, typer.Option("--undo", help="Show their events unredacted again.")
    ] = False,
    dsn: DsnOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show a user's events redacted to users and servers who were not in the room then.

    No event is deleted. The values of facts published under their id are.
    """
    changed = run(_forget(dsn, user, undo=undo), AGAIN)
    if as_json:
        print_json({"user": user, "erased": not undo, "changed": changed})
        return
    state = "is not forgotten" if undo else "is forgotten"
    typer.echo(f"{user} {state}" + ("" if changed else ", and was so before"))


async def _forget(dsn: str | None, user: str, *, undo: bool) -> bool:
    user_id = args.user(user)
    async with maintained(dsn) as database, database.connection() as conn:
        return await (
            restore_user(conn, user_id)
            if undo
            else erase_user(conn, user_id, time.time_ns() // 1_000_000)
        )
