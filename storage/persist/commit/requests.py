"""The work of the writer: append calls, and the batches that hold their events."""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import AnyEvent
from storage.persist.model.results import AppendResult
from storage.persist.model.rows import RoomRow


@dataclass(slots=True, eq=False)
class AppendRequest:
    """One append call.

    ``planned`` counts its events in plans. ``answers`` are the results of its written events.
    ``on_finished`` is called once, when it is finished. A cancelled caller does not finish it.
    """

    incoming: Sequence[AnyEvent]
    future: asyncio.Future[list[AppendResult]]
    on_finished: Callable[["AppendRequest"], None]
    planned: int = 0
    answers: list[AppendResult] = field(default_factory=list)
    failed: bool = False
    is_repeated: bool = False
    """Whether the last planned event was stored before, so that the next ones may be, too."""
    caller: Any = None
    """The caller's span, if tracing is enabled."""
    rooms: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.rooms = frozenset([event.room_id for event in self.incoming])

    @property
    def rest(self) -> Sequence[AnyEvent]:
        """Return the events that are not written yet."""
        return self.incoming[len(self.answers) :]

    @property
    def is_finished(self) -> bool:
        return self.failed or len(self.answers) == len(self.incoming)

    def answer(self, answers: Iterable[AppendResult]) -> None:
        """Add the results of written events. Resolve the future once all are there."""
        was_finished = self.is_finished
        self.answers.extend(answers)
        if not self.is_finished:
            return
        if not self.future.done():
            self.future.set_result(self.answers)
        if not was_finished:
            self.on_finished(self)

    def fail(self, error: Exception) -> None:
        was_finished, self.failed = self.is_finished, True
        if not self.future.done():
            self.future.set_exception(error)
        if not was_finished:
            self.on_finished(self)


@dataclass(slots=True, eq=False)
class WriteBatch:
    """One write: its rows, and the results of each append once it is committed.

    ``error`` is the reason of a failure.
    """

    change_set: ChangeSet
    answers: dict[AppendRequest, list[AppendResult]] = field(default_factory=dict)
    remembered: dict[str, RoomRow] = field(default_factory=dict)
    """The cached rooms that answers without a write depend on."""
    size: int = 0
    connection_generation: int = 0
    """`Database.connection_generation` when the plan was begun.

    A plan is valid for that database only.
    """
    sent: bool = False
    error: Exception | None = None
    is_of_slow_room: bool = False
    """Whether it is a plan of the slow rooms (`storage.persist.commit.group_commit`)."""
    finished: asyncio.Event | None = None
    """Set once the plan is written or dropped. Only for plans of the slow rooms."""

    def forget(self, request: AppendRequest) -> None:
        """Drop an append from the batch if none of its events are planned here."""
        if not self.answers.get(request):
            self.answers.pop(request, None)

    def done(self, caches: WriterCaches, positions: dict[int, int]) -> None:
        """Return the results to the callers, with the stream positions of the events."""
        for request, answers in self.answers.items():
            request.answer(
                [_positioned(self.change_set, caches, answer, positions) for answer in answers]
            )


def _positioned(
    change_set: ChangeSet, caches: WriterCaches, answer: AppendResult, positions: dict[int, int]
) -> AppendResult:
    """Return the result with the event's stream position.

    The event may also be one of an earlier write that was running when this was planned.
    """
    if answer.event_id is None or answer.stream_ordering is not None:
        return answer
    row = change_set.events.rows.get(answer.event_id) or caches.rows.row(answer.event_id)
    if row is None or row.outlier:
        return answer
    position = positions.get(row.event_nid, row.stream_ordering)
    if position is None:
        return answer
    return AppendResult(
        answer.event_id, answer.outcome, answer.reason, position, row.topological_ordering
    )
