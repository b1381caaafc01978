"""Shared by commands: the options of a database, and how it is opened."""

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

import typer

from storage.config import Config
from storage.database.dsn import (
    IN_PROCESS_LIST,
    SYNAPSE_VARIABLE,
    VARIABLE,
    environment_dsn,
    has_password,
)
from storage.database.embedded import embedded_postgres
from storage.errors import InputError, InstanceNameTaken
from storage.store.facade import Store
from storage.store.open import open_store

logger: logging.Logger = logging.getLogger(__name__)


def given_dsn(given: str | None, context: typer.Context, what: str, variable: str) -> str | None:
    """Return a DSN of the command line, else that of the environment.

    Warn of a password on the command line.
    """
    if given is None:
        return None if context.resilient_parsing else environment_dsn(variable=variable)
    if has_password(given):
        logger.warning(IN_PROCESS_LIST, what, variable, variable)
    return given


def _dsn(context: typer.Context, given: str | None) -> str | None:
    return given_dsn(given, context, "--dsn", VARIABLE)


DsnOption = Annotated[
    str | None,
    typer.Option(
        "--dsn",
        metavar="DSN",
        callback=_dsn,
        help=(
            "postgresql://…; default: STORAGE_DSN, else the line of the file STORAGE_DSN_FILE,"
            " else the embedded Postgres."
        ),
        show_default=False,
    ),
]
ServerNameOption = Annotated[
    str | None,
    typer.Option(
        "--server-name",
        envvar="STORAGE_SERVER_NAME",
        metavar="NAME",
        help=(
            "The homeserver's name: its users are local."
            " Default: the name that the database remembers."
        ),
        show_default=False,
    ),
]


def instance_name_option() -> Any:
    """Return the option `--instance-name`, for a default of the command's own."""
    return typer.Option(
        metavar="NAME",
        envvar="STORAGE_INSTANCE_NAME",
        help="The name of this process; it must be unique.",
    )


JsonOption = Annotated[
    bool, typer.Option("--json", help="JSON for programs instead of a table for people.")
]


def synapse_dsn_of(context: typer.Context, given: str | None) -> str | None:
    """Return the DSN of a Synapse: as given, else of its variable or file."""
    found = given_dsn(given, context, "SYNAPSE_DSN", SYNAPSE_VARIABLE)
    if found is None and not context.resilient_parsing:
        raise InputError(f"give SYNAPSE_DSN, or set {SYNAPSE_VARIABLE} or {SYNAPSE_VARIABLE}_FILE")
    return found


@asynccontextmanager
async def database_dsn(dsn: str | None, config: Config) -> AsyncIterator[str]:
    """Yield the given DSN, or that of the embedded Postgres for the duration of the block."""
    if dsn is not None:
        yield dsn
        return
    async with embedded_postgres(config=config) as embedded:
        yield embedded


@asynccontextmanager
async def opened_store(
    dsn: str | None, *, server_name: str | None, instance_name: str
) -> AsyncIterator[Store]:
    """Open a store under the name of `--instance-name`, with the settings of the environment."""
    opening = open_store(
        dsn, server_name=server_name, instance_name=instance_name, config=Config.from_env()
    )
    async with AsyncExitStack() as stack:
        try:
            store = await stack.enter_async_context(opening)
        except InstanceNameTaken as error:
            raise InstanceNameTaken(
                f"another process is at work under the name {instance_name}:"
                " stop it, or choose another name with --instance-name"
            ) from error
        yield store
