"""`room-storage migrate`: upgrade the schema, or print the SQL that would."""

import logging
from typing import TYPE_CHECKING, Annotated

import typer

from storage.cli.common import DsnOption, JsonOption, database_dsn
from storage.cli.interrupt import AGAIN, run
from storage.cli.output import print_rows, print_values
from storage.config import Config
from storage.database.deployment import grant, grants_sql
from storage.database.migrate import (
    HEAD_REVISION,
    MigrationOptions,
    current_and_pending,
    had_writer,
    later_sentence,
    left_sentence,
    migrate,
    migrate_before,
    migration_sql,
    scripts_directory,
)

if TYPE_CHECKING:
    from storage.database.migration_steps import MigrationStep


DONE = f"the steps before stay done; {AGAIN}"


def command(
    dsn: DsnOption = None,
    *,
    pre: Annotated[
        bool,
        typer.Option(
            "--pre",
            help=(
                "Only the steps that are safe while processes of the previous release run;"
                " all steps if no process has ever opened the database."
            ),
        ),
    ] = False,
    listed: Annotated[
        bool, typer.Option("--list", help="List the pending steps; do nothing.")
    ] = False,
    grants: Annotated[
        bool,
        typer.Option("--grants", help="Only create the roles and grant their privileges, again."),
    ] = False,
    role_prefix: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            envvar="STORAGE_ROLE_PREFIX",
            help="The prefix of the roles (room_storage); none: no roles.",
            show_default=False,
        ),
    ] = None,
    lock_timeout_ms: Annotated[
        int | None,
        typer.Option(
            metavar="MS", min=1, help="How long a step waits for a lock (2000).", show_default=False
        ),
    ] = None,
    sql: Annotated[
        bool,
        typer.Option(
            "--sql", help="Print the statements for an empty database instead of running them."
        ),
    ] = False,
    alembic_config: Annotated[
        bool,
        typer.Option(
            "--alembic-config",
            help="Print the path of alembic's settings: ALEMBIC_CONFIG=PATH alembic current.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Upgrade the schema of the database to the revision that this version needs."""
    logging.getLogger("alembic").setLevel(logging.WARNING)
    how = MigrationOptions(lock_timeout_ms=lock_timeout_ms, role_prefix=role_prefix)
    if alembic_config:
        typer.echo(scripts_directory() / "alembic.ini")
    elif sql:
        typer.echo(grants_sql(role_prefix) if grants else migration_sql(how=how), nl=False)
    elif listed:
        _list(dsn, how, as_json=as_json)
    elif grants:
        print_values({"warnings": run(_grant(dsn, role_prefix), AGAIN)}, as_json=as_json)
    else:
        _print_revision(run(_migrate(dsn, how, pre=pre), DONE) or "", as_json=as_json)


def _print_revision(revision: str, *, as_json: bool) -> None:
    if not as_json and revision > HEAD_REVISION:
        typer.echo(later_sentence(revision, HEAD_REVISION))
        return
    print_values({"revision": revision or None, "wanted": HEAD_REVISION}, as_json=as_json)
    if not as_json and revision < HEAD_REVISION:
        typer.echo(left_sentence(revision))


def _list(dsn: str | None, how: MigrationOptions, *, as_json: bool) -> None:
    current, steps = run(_pending(dsn, how))
    rows = [
        (step.revision, step.phase, step.title, step.job.name if step.job else None)
        for step in steps
    ]
    print_rows("Steps", ["revision", "phase", "step", "background job"], rows, as_json=as_json)
    if not steps and not as_json:
        typer.echo(f"nothing to do: the schema is {current}")


async def _migrate(dsn: str | None, how: MigrationOptions, *, pre: bool) -> str | None:
    async with database_dsn(dsn, Config.from_env()) as target:
        if pre and await had_writer(target, how=how):
            return await migrate_before(target, how=how)
        return await migrate(target, how=how)


async def _pending(
    dsn: str | None, how: MigrationOptions
) -> "tuple[str | None, list[MigrationStep]]":
    async with database_dsn(dsn, Config.from_env()) as target:
        return await current_and_pending(target, how=how)


async def _grant(dsn: str | None, prefix: str | None) -> str:
    async with database_dsn(dsn, Config.from_env()) as target:
        return "\n".join(await grant(target, prefix=prefix)) or "none"
