"""Time and number of statements of each query."""

import statistics
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from storage.cli.demo.rooms import DemoRoom
from storage.cli.demo.story import ALICE, DemoStory
from storage.cli.demo.teller import TablePrinter
from storage.ids import EventId
from storage.store.facade import Store

TIMES: Final = 15


@dataclass(slots=True)
class StatementTimer:
    """An observer that counts statements."""

    count: int = 0

    def before(self, statement: str) -> None:  # noqa: ARG002  # the observer's interface
        """See `storage.database.connection.Observer`."""
        self.count += 1

    def after(self, statement: str, seconds: float) -> None:
        """See `storage.database.connection.Observer`."""


async def timed(
    teller: TablePrinter,
    store: Store,
    story: DemoStory,
    made: list[DemoRoom],
    counter: StatementTimer,
) -> None:
    """Run each query several times; show the medians."""
    chat = max((one.room for one in made if one.what == "an old room"), key=len)
    last = EventId(chat.events[-1].event_id)
    since = (await store.sync(ALICE, timeline_limit=1)).next_batch
    messages = iter(
        [story.room.message(ALICE, f"Still counting: {number}").pdu for number in range(TIMES)]
    )  # signed before the measurement
    questions: dict[str, Callable[[], Awaitable[object]]] = {
        "sync, everything": lambda: store.sync(ALICE),
        "sync, nothing new": lambda: store.sync(ALICE, since=since),
        "a page of 50": lambda: store.messages(chat.room_id, ALICE, limit=50),
        "the state before an event": lambda: store.state_before(last),
        "backfill of 50 for a server": lambda: store.backfill(
            chat.room_id, [last], 50, server_name="s2.test"
        ),
        "may a user see 100 events": lambda: store.visible_to_user(
            ALICE, [event.event_id for event in chat.events[-100:]]
        ),
        "append one message": lambda: store.append([next(messages)]),
    }
    rows = [(what, *await _measured(question, counter)) for what, question in questions.items()]
    teller.table(
        "Timings",
        f"Medians of {TIMES}, one query at a time; BEGIN and COMMIT count as statements.",
        ["query", "ms", "statements"],
        rows,
    )


async def _measured(
    question: Callable[[], Awaitable[object]], counter: StatementTimer
) -> tuple[float, float]:
    took = []
    counter.count = 0
    for _ in range(TIMES):
        start = time.perf_counter()
        await question()
        took.append((time.perf_counter() - start) * 1_000)
    return round(statistics.median(took), 2), round(counter.count / TIMES, 1)
