"""`room-storage demo`: run examples/first_room.py, store generated rooms, and verify them all.

The rooms lie where no other data does. Without a DSN that is the embedded Postgres with the folder
`demo` below the usual data folder; with a DSN it is the schema `room_storage_demo` of that
database. A database is for one homeserver, and the demonstration's is s1.test. So it does not claim
the database of the quick start, or of a real server.
"""

import importlib.util
import os
import shlex
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Final, NamedTuple
from urllib.parse import urlsplit

import typer

from storage.cli.common import DsnOption, JsonOption, described
from storage.cli.interrupt import run
from storage.cli.output import print_json
from storage.config import Config
from storage.database.connection import Database
from storage.database.embedded import data_directory, embedded_postgres
from storage.errors import StorageCorrupt
from storage.maintenance.totals import counts
from storage.maintenance.verify import verify
from storage.store.facade import Store
from storage.store.open import open_store
from storage.testing import SHAPES, RoomBuilder, generate_room

PROGRAM: Final = "examples/first_room.py"
SERVER_NAME: Final = "s1.test"
FOLDER: Final = "demo"
SCHEMA: Final = "room_storage_demo"
SCHEMA_VARIABLE: Final = "STORAGE_DATABASE_SCHEMA"
CREATE_SCHEMA: Final = "CREATE SCHEMA IF NOT EXISTS room_storage_demo"
GENERATED: Final = (
    ("small_chat", "10", 300),
    ("fork_heavy", "9", 300),
    ("join_leave_storm", "6", 300),
    ("small_chat", "2", 200),
)
"""Rooms by shape (`storage.testing.SHAPES`), version and number of events."""


class DemoDatabase(NamedTuple):
    """An open database for the demonstration.

    ``about``: where the data lies. ``settings``: the line of a shell with which other commands find
    it. ``removal``: the command that deletes it.
    """

    dsn: str
    config: Config
    about: str
    settings: str
    removal: str


def command(dsn: DsnOption = None, *, as_json: JsonOption = False) -> None:
    """Create a few rooms, store them, show what users get, and verify the database.

    Each run adds new rooms, made from another seed. The data lies in a folder of its own, or with a
    DSN in the schema room_storage_demo, so that it never meets other data.
    """
    run(_demo(dsn, Config.from_env(), as_json=as_json))


async def _demo(dsn: str | None, config: Config, *, as_json: bool) -> None:
    results: dict[str, object] = {}
    program = first_room()
    room: RoomBuilder = program.new_room()
    async with (
        demo_database(dsn, config) as database,
        open_store(
            database.dsn,
            server_name=SERVER_NAME,
            instance_name="demo",
            config=database.config,
            migrate=True,
        ) as store,
    ):
        async for title, value in _shown(store, program, room, database):
            results[title] = value
            if not as_json:
                typer.echo(f"{title}: {value}")
    if as_json:
        print_json(results)
        return
    typer.echo("\nWhat next\n")
    for line in commands(database, room, program.BOB):
        typer.echo(f"  {line}")
    typer.echo(f"\nTo delete the data: {database.removal}")


async def _shown(
    store: Store, program: ModuleType, room: RoomBuilder, database: DemoDatabase
) -> AsyncIterator[tuple[str, object]]:
    """Yield each result with its title. Raise `StorageCorrupt` if `verify` finds something."""
    yield "data", database.about
    async for title, value in program.shown(store, room):
        yield title, value
    room_ids = [room.room_id]
    for number, (shape, version, count) in enumerate(GENERATED, 1):
        made = generate_room(SHAPES[shape], count, seed=time.time_ns() + number, version=version)
        room_ids.append(made.room_id)
        start = time.perf_counter()
        stored = await store.append(made.pdus, room_version=version, verify_keys=made.keys)
        seconds = time.perf_counter() - start
        outcomes = Counter(result.outcome for result in stored)
        numbers = ", ".join(f"{amount:,} {outcome}" for outcome, amount in outcomes.items())
        yield f"{shape}, version {version}", f"{numbers}, in {seconds:.2f} s"
    findings = [
        finding
        async for finding in verify(store.database, server_name=SERVER_NAME, room_ids=room_ids)
    ]
    if findings:
        raise StorageCorrupt("the demonstration found a difference", room_id=findings[0].room_id)
    yield "verify", "all derived data is as computed again"
    async with store.database.connection() as conn:
        totals = await counts(conn)
    yield "stored", f"{totals.events:,} events in {totals.rooms} rooms"


def first_room() -> ModuleType:
    """Return the program of the example.

    It is in the package if that was installed from a wheel, else in the source tree.
    """
    package = Path(__file__).resolve().parent.parent
    inside = package / PROGRAM
    path = inside if inside.exists() else package.parent / PROGRAM
    spec = importlib.util.spec_from_file_location("first_room", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"no program: {path}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@asynccontextmanager
async def demo_database(
    dsn: str | None, config: Config, environ: Mapping[str, str] = os.environ
) -> AsyncIterator[DemoDatabase]:
    """Open the place for the demonstration; create it if it does not exist."""
    if dsn is None:
        folder = (data_directory(environ) / FOLDER).absolute()
        async with embedded_postgres(folder, config=config) as embedded:
            yield _in_folder(embedded, config, folder)
        return
    if SCHEMA_VARIABLE not in environ:
        async with (
            await Database.open(dsn, config=replace(config, pool_size_max=1)) as database,
            database.connection() as conn,
        ):
            await conn.execute(CREATE_SCHEMA)
        config = replace(config, database_schema=SCHEMA)
    yield _in_database(dsn, config, environ)


def _in_folder(dsn: str, config: Config, folder: Path) -> DemoDatabase:
    quoted = shlex.quote(str(folder))
    return DemoDatabase(
        dsn,
        config,
        f"{folder} (embedded Postgres)",
        f"export STORAGE_DATA_DIR={quoted}",
        f"rm -r {quoted}",
    )


def _in_database(dsn: str, config: Config, environ: Mapping[str, str]) -> DemoDatabase:
    schema = config.database_schema
    variables = [f"{SCHEMA_VARIABLE}={shlex.quote(schema)}"]
    if environ.get("STORAGE_DSN") != dsn:
        # a password is not printed
        shown = '"…the DSN that you gave…"' if urlsplit(dsn).password else shlex.quote(dsn)
        variables.insert(0, f"STORAGE_DSN={shown}")
    drop = shlex.quote(f'DROP SCHEMA "{schema}" CASCADE')
    return DemoDatabase(
        dsn,
        config,
        f"database {described(dsn, schema)}",
        "export " + " ".join(variables),
        f'psql "$STORAGE_DSN" -c {drop}',
    )


def commands(database: DemoDatabase, room: RoomBuilder, bob: str) -> Iterator[str]:
    """Yield lines for a shell: settings first, then commands that use the example's room."""
    event = room.events[-1].event_id
    yield database.settings
    for arguments in (
        ["stats"],
        ["explain-visibility", event, bob],
        ["explain", "messages", "--user", bob, "--room", room.room_id],
        ["export", "demo.ndjson", "--room", room.room_id],
        ["verify", "--room", room.room_id],
    ):
        yield shlex.join(["room-storage", *arguments])
