"""`room-storage forget-user`: erase a user who asked to be forgotten."""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from storage import arguments as args
from storage.cli.archive import print_swept
from storage.cli.common import DsnOption, JsonOption, QuietOption, maintained, run_on_database
from storage.cli.interrupt import AGAIN, run
from storage.cli.output import amount, print_json
from storage.database.connection import Database
from storage.errors import InputError
from storage.ids import UserId
from storage.maintenance.censor import RemovedContent, remove_content
from storage.maintenance.cold_archive import Swept, sweep_if_free
from storage.observability.counters import Report
from storage.persist.readmit import erase_user, is_named, restore_user


def command(
    user: Annotated[
        str, typer.Argument(metavar="USER", help="@localpart:server", show_default=False)
    ],
    *,
    undo: Annotated[
        bool, typer.Option("--undo", help="Show their events unredacted again.")
    ] = False,
    remove: Annotated[
        bool,
        typer.Option("--remove", help="Also remove the content of their events, permanently."),
    ] = False,
    dsn: DsnOption = None,
    quiet: QuietOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show a user's events redacted to users and servers who were not in the room then.

    Events stay. The values of facts published under their id are deleted. With --remove, nobody
    gets the content of their events any more.
    """
    if undo and remove:
        raise InputError("--undo cannot restore what --remove has removed: give one of them")
    if remove:
        user_id = args.user(user)
        done, swept = run_on_database(
            dsn, lambda database, show: _remove(database, user_id, show), AGAIN, quiet=quiet
        )
        _print_removed(user, done, swept, as_json=as_json)
        return
    changed, is_known = run(_forget(dsn, user, undo=undo), AGAIN)
    if as_json:
        print_json({"user": user, "erased": not undo, "changed": changed, "known": is_known})
        return
    state = "is not forgotten" if undo else "is forgotten"
    typer.echo(f"{user} {state}" + ("" if changed else ", and was so before"))
    if not is_known:
        typer.echo("no stored event names this user: check the id")


async def _forget(dsn: str | None, user: str, *, undo: bool) -> tuple[bool, bool]:
    """Return whether that is new, and whether the user was known before."""
    user_id = args.user(user)
    async with maintained(dsn) as database, database.connection() as conn:
        is_known = await is_named(conn, user_id)
        changed = await (
            restore_user(conn, user_id)
            if undo
            else erase_user(conn, user_id, time.time_ns() // 1_000_000)
        )
        return changed, is_known


async def _remove(database: Database, user: UserId, show: Report) -> tuple[RemovedContent, Swept]:
    done = await remove_content(database, user, report=show)
    return done, await sweep_if_free(database, report=show)


def _print_removed(user: str, done: RemovedContent, swept: Swept, *, as_json: bool) -> None:
    if as_json:
        print_json({"user": user, "erased": True, **asdict(done), "archive": swept._asdict()})
        return
    typer.echo(f"{user} is forgotten: {amount(done.removed, 'event')} without content now")
    if done.left:
        typer.echo(f"{done.left:,} left: the content is still needed to authorise other events")
    print_swept(swept)
