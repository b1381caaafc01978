"""The second stage of an import: examined events into the store, in executors, by the planner and writer of the live path.

Each task opens a store of its own under a name of its own, with two connections at most. Its events come sorted: room by room, each in the
order in which it is to be stored. They are appended in large batches. An append is idempotent, so a task that is repeated, or an
import that is run again after its end at any moment, goes on where it was.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, Self, cast

import pyarrow as pa
import uvloop

from storage.config import Config
from storage.errors import CommitUnknown, DatabaseConflict
from storage.event import load
from storage.ids import EventId
from storage.opening import open_store
from storage.persist.plan import Incoming
from storage.persist.results import AppendResult, Origin
from storage.store import Store

CONNECTIONS: Final = 2
ATTEMPTS: Final = 3
BATCH_MAX: Final = 1_000

LOADED: Final = pa.schema(
    [
        ("source", pa.string()),
        ("line", pa.int64()),
        ("outcome", pa.string()),
        ("count", pa.int64()),
        ("event_id", pa.string()),
        ("reason", pa.string()),
        ("missing", pa.list_(pa.string())),
        ("pdu", pa.binary()),
    ]
)
"""What became of the events: of those that were not stored a row each, of the others how many there were of each outcome."""


class Arrival(NamedTuple):
    """An event to store, and what to say of it if it is not."""

    incoming: Incoming
    source: str
    line: int


@dataclass(frozen=True, slots=True)
class Target:
    """The store to write to. ``instance_name``: tasks write under this and their number."""

    dsn: str
    server_name: str | None
    instance_name: str = "spark"

    def name(self, number: int) -> str:
        """The name that a task writes under."""
        return f"{self.instance_name}-{number}"


class Loader:
    """A store in this process, to be used without an event loop of one's own."""

    def __init__(self, target: Target, number: int) -> None:
        self._target = target
        self._number = number
        self.outcomes: Counter[str] = Counter()

    def __enter__(self) -> Self:
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._stack = AsyncExitStack()
        try:
            self._store: Store = self._runner.run(self._open())
        except BaseException:
            self._runner.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._runner.run(self._stack.aclose())
        finally:
            self._runner.close()

    async def _open(self) -> Store:
        config = replace(Config.from_env(), pool_size_max=CONNECTIONS)
        name = self._target.name(self._number)
        opened = open_store(self._target.dsn, server_name=self._target.server_name, instance_name=name, config=config)
        return await self._stack.enter_async_context(opened)

    def append(self, arrivals: list[Arrival]) -> list[tuple[Arrival, AppendResult]]:
        """Store these in order; those that were not stored, with their answers."""
        results = self._runner.run(self._append_all([one.incoming for one in arrivals]))
        self.outcomes.update(result.outcome for result in results if result.is_stored)
        return [(one, result) for one, result in zip(arrivals, results, strict=True) if not result.is_stored]

    async def _append_all(self, incoming: list[Incoming]) -> list[AppendResult]:
        """Batch after batch: the writer takes them in this order, and plans the next while one is being written.

        If one fails, those behind it may have lacked its events: all are appended once more, which is idempotent.
        """
        batches = [incoming[start : start + BATCH_MAX] for start in range(0, len(incoming), BATCH_MAX)]
        answers = await asyncio.gather(*map(self._store.writer.append, batches), return_exceptions=True)
        if any(isinstance(answer, BaseException) for answer in answers):
            return [result for batch in batches for result in await self._append(batch)]
        return [result for answer in answers if not isinstance(answer, BaseException) for result in answer]

    async def _append(self, incoming: list[Incoming]) -> list[AppendResult]:
        for _ in range(1, ATTEMPTS):
            try:
                return await self._store.writer.append(incoming)
            except (CommitUnknown, DatabaseConflict):
                continue
        return await self._store.writer.append(incoming)


def arrival(row: dict[str, Any]) -> Arrival:
    """A row of `storage.pipeline.examining.EXAMINED`."""
    event = load(row["pdu"], row["room_version"], row["event_id"], redacted=row["redacted_form"])
    state = row["state_before"]
    given = None if state is None else tuple(map(EventId, state))
    return Arrival(Incoming(event, cast("Origin", row["origin"]), given), row["source"], row["line"])


def load_batches(target: Target, number: int, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Store what comes, in order; gives `LOADED`."""
    with Loader(target, number) as loader:
        for batch in batches:
            failed = loader.append([arrival(row) for row in batch.to_pylist()])
            if failed:
                yield rejects(failed)
        yield counts(loader.outcomes)


def rejects(failed: Iterable[tuple[Arrival, AppendResult]]) -> pa.RecordBatch:
    """A row each."""
    rows = [
        {
            "source": one.source,
            "line": one.line,
            "outcome": result.outcome,
            "count": 1,
            "event_id": one.incoming.event.event_id,
            "reason": result.reason,
            "missing": list(result.missing),
            "pdu": one.incoming.event.raw,
        }
        for one, result in failed
    ]
    return pa.RecordBatch.from_pylist(rows, schema=LOADED)


def counts(outcomes: Counter[str]) -> pa.RecordBatch:
    """A row for each outcome."""
    return pa.RecordBatch.from_pylist([{"outcome": name, "count": count} for name, count in sorted(outcomes.items())], schema=LOADED)
