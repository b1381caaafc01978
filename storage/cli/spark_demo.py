"""`room-storage spark demo`: import, export, verify and stream, in a separate Postgres."""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import typer

from storage.config import Config
from storage.database.embedded import embedded_postgres
from storage.database.migrate import migrate
from storage.errors import StorageCorrupt
from storage.testing import ODD_SOME, SHAPES, generate_room, write_ndjson

ROOMS: Final = 6
EVENTS: Final = 400
SERVER: Final = "s1.test"


def show(pipeline: ModuleType, session: Callable[[], Any]) -> None:
    """Run each step; print its result and its duration.

    Raise `StorageCorrupt` if a step finds a difference.
    """
    with (
        tempfile.TemporaryDirectory(prefix="room-storage-") as folder,
        _database(Path(folder) / "postgres") as dsn,
        session() as spark,
    ):
        base = Path(folder)
        with (base / "rooms.ndjson").open("wb") as file:
            for seed, version in enumerate(("1", "6", "9", "10", "11", "12")[:ROOMS]):
                room = generate_room(
                    SHAPES["small_chat"].replaced(odd=ODD_SOME), EVENTS, seed=seed, version=version
                )
                write_ndjson(room, file)
        started = time.monotonic()

        def say(what: str) -> None:
            nonlocal started
            now = time.monotonic()
            typer.echo(f"{now - started:6.1f} s  {what}")
            started = now

        summary = pipeline.import_archive(
            spark,
            [str(base / "rooms.ndjson")],
            dsn,
            server_name=SERVER,
            rejects=str(base / "rejects"),
            work=str(base / "work"),
        )
        numbers = ", ".join(
            f"{count:,} {outcome}" for outcome, count in summary.outcomes.most_common()
        )
        say(f"import: {summary.lines:,} lines of {ROOMS} rooms, each of another version: {numbers}")
        made = pipeline.export_parquet(spark, dsn, str(base / "export"), partitions=2)
        say(
            f"export: {made.events:,} events, {made.state_deltas:,} state deltas,"
            f" {made.visibility:,} intervals of visibility; read back, equal"
        )
        streamed = _streamed(spark, dsn, base)
        say(f"stream: {streamed:,} events in batches of 1,000, each once")
        findings = pipeline.verify(spark, dsn).count()
        say(f"verify: {findings} differences")
        if findings or streamed + summary.rejects + summary.outcomes["duplicate"] != summary.lines:
            raise StorageCorrupt(
                "the demonstration found a difference",
                findings=findings,
                streamed=streamed,
                lines=summary.lines,
            )


def _streamed(spark: Any, dsn: str, base: Path) -> int:
    frame = (
        spark.readStream.format("room_events")
        .options(dsn=dsn, maxEventsPerBatch="1000", partitions="2")
        .load()
    )
    writing = frame.writeStream.format("parquet").option("path", str(base / "stream"))
    query = (
        writing.option("checkpointLocation", str(base / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    read_back = spark.read.parquet(str(base / "stream"))
    return int(read_back.select("event_id").distinct().count())


@contextmanager
def _database(folder: Path) -> Iterator[str]:
    """Start an empty, migrated Postgres."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            config = replace(Config.from_env(), embedded_fsync=False)
            dsn = runner.run(stack.enter_async_context(embedded_postgres(folder, config=config)))
            runner.run(migrate(dsn))
            yield dsn
        finally:
            runner.run(stack.aclose())
