"""The order of the demonstration."""

import tempfile
import time
from pathlib import Path

from storage.cli.common import DsnOption, JsonOption
from storage.cli.demo import rooms, scenes
from storage.cli.demo.place import demo_place
from storage.cli.demo.teller import TablePrinter
from storage.cli.demo.timing import StatementTimer, timed
from storage.cli.demo.what_next import what_next
from storage.cli.interrupt import run
from storage.cli.progress import ProgressDisplay
from storage.cli.stats import read_stats, table_rows
from storage.config import Config
from storage.importing import Import, Rejects
from storage.store.facade import Store
from storage.store.open import open_store

SERVER_NAME = "s1.test"


def command(dsn: DsnOption = None, *, as_json: JsonOption = False) -> None:
    """Create a few rooms, store them, and show what is visible to users and servers.

    Each run adds new rooms, made from another seed. The data lies in a folder of its own, or with a
    DSN in the schema room_storage_demo, so that it never meets other data.
    """
    run(_demo(dsn, TablePrinter(as_json), Config.from_env()))


async def _demo(dsn: str | None, teller: TablePrinter, config: Config) -> None:
    counter = StatementTimer()
    async with (
        demo_place(dsn, config) as place,
        open_store(
            place.dsn,
            server_name=SERVER_NAME,
            instance_name="demo",
            config=place.config,
            migrate=True,
            observer=counter,
        ) as store,
    ):
        teller.line(f"data: {place.about}")
        story, made = rooms.make(await rooms.first_seed(store))
        scenes.rooms(teller, made)
        await _import(teller, store, made)
        await scenes.synced(teller, store, story)
        await scenes.paged(teller, store, story.room.room_id)
        await scenes.seen(teller, store, story)
        await scenes.state(teller, store, story)
        await scenes.backfilled(teller, store, story)
        await timed(teller, store, story, made, counter)
        async with store.database.connection() as conn:
            stats = await read_stats(conn)
        teller.table(
            "On disk, in bytes",
            f"{stats.counts.events:,} events in {stats.counts.rooms} rooms.",
            *table_rows(stats),
        )
        what_next(teller, place, story)
    teller.end()


async def _import(teller: TablePrinter, store: Store, made: list[rooms.DemoRoom]) -> None:
    with tempfile.TemporaryDirectory(prefix="room-storage-demo-") as folder:
        files, size = rooms.to_files(made, Path(folder))
        with ProgressDisplay() as show:
            start = time.perf_counter()
            summary = await Import(store, Rejects(None), report=show, total_bytes=size).run(files)
            seconds = time.perf_counter() - start
    scenes.imported(teller, summary, seconds)
