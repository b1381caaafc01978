"""Options, session and package that all commands of `room-storage spark` share."""

import asyncio
import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, AsyncExitStack, contextmanager
from importlib.util import find_spec
from types import ModuleType
from typing import Annotated, Any, Final

import typer

from storage.cli.common import database_dsn
from storage.cli.interrupt import AGAIN, interruptible
from storage.config import Config
from storage.database.connection import Database
from storage.database.migrate import check_schema, migrate
from storage.errors import ExtraMissing, InputError

MasterOption = Annotated[
    str, typer.Option("--master", help="Where Spark runs: local[N], spark://…, yarn, k8s://….")
]
ConfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--conf",
        metavar="KEY=VALUE",
        help="A setting of Spark; may be given several times.",
        show_default=False,
    ),
]
TasksOption = Annotated[
    int | None,
    typer.Option(
        "--tasks",
        min=1,
        help="The maximum number of concurrent tasks; each has at most two connections.",
        show_default=False,
    ),
]
KeepOption = Annotated[
    int,
    typer.Option(
        "--keep", min=0, metavar="HOURS", help="How long old versions of the tables stay."
    ),
]
LOCAL: Final = "local[*]"
KEPT_HOURS: Final = 168


def folder_option(name: str, text: str) -> Any:
    """Return the declaration of an option with a folder; ``text`` is its help."""
    return typer.Option(name, metavar="FOLDER", help=text, show_default=False)


def pipeline() -> ModuleType:
    """Return the package `storage.pipeline`, which needs the extra.

    Raise `ExtraMissing` where it is not installed.
    """
    if find_spec("pyspark") is None or find_spec("adbc_driver_postgresql") is None:
        raise ExtraMissing("Spark", "spark")
    return importlib.import_module("storage.pipeline")


@contextmanager
def opened_session(
    dsn: str | None, master: str, conf: list[str] | None, advice: str = AGAIN
) -> Iterator[tuple[Any, str]]:
    """Open a session; yield it with the DSN of a database that has the current schema.

    A signal ends the jobs, the session and its JVM, and raises `Interrupted` with the ``advice``.
    """
    start = _starter(master, conf)
    with interruptible(advice), asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            target = runner.run(_ready(stack, dsn))
            with start() as spark:
                yield spark, target
        finally:
            runner.run(stack.aclose())


@contextmanager
def session_alone(master: str, conf: list[str] | None, advice: str = AGAIN) -> Iterator[Any]:
    """Open a session as above, for work that needs no database."""
    start = _starter(master, conf)
    with interruptible(advice), start() as spark:
        yield spark


def _starter(master: str, conf: list[str] | None) -> Callable[[], AbstractContextManager[Any]]:
    """Return what opens the session. Raise where Java, the extra or a setting is missing."""
    pipeline()
    sessions = importlib.import_module("storage.pipeline.session")
    settings = dict(setting(option) for option in conf or ())
    sessions.check_master(master)
    sessions.check_java()

    @contextmanager
    def start() -> Iterator[Any]:
        with sessions.executor_errors(), sessions.session(master, settings) as spark:
            yield spark

    return start


async def _ready(stack: AsyncExitStack, dsn: str | None) -> str:
    config = Config.from_env()
    target = await stack.enter_async_context(database_dsn(dsn, config))
    if dsn is None:
        await migrate(target)
    async with (
        await Database.open(target, config=config) as database,
        database.connection() as conn,
    ):
        await check_schema(conn)
    return target


def setting(text: str) -> tuple[str, str]:
    """Return the key and the value of ``--conf``. Raise `InputError`."""
    name, separator, value = text.partition("=")
    if not separator:
        raise InputError(f"--conf {text}: give KEY=VALUE")
    return name, value
