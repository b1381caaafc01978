"""What the writer has in hand: append calls, and the plans that hold their events."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage.persist.model.caches import WriterCaches
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.results import AppendResult


@dataclass(slots=True, eq=False)
class AppendRequest:
    """One append call on its way.

    ``planned``: how many of its events are in a plan; ``answers``: of those that are written.
    """

    incoming: Sequence[IncomingEvent]
    future: asyncio.Future[list[AppendResult]]
    planned: int = 0
    answers: list[AppendResult] = field(default_factory=list)
    failed: bool = False
    caller: Any = None
    """The span it is made for, if somebody traces."""
    rooms: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        self.rooms = frozenset([one.event.room_id for one in self.incoming])

    @property
    def rest(self) -> Sequence[IncomingEvent]:
        """The events that are not written yet."""
        return self.incoming[len(self.answers) :]

    @property
    def is_over(self) -> bool:
        """Whether there is nothing left to do."""
        return self.failed or len(self.answers) == len(self.incoming)

    def answer(self, answers: Iterable[AppendResult]) -> None:
        """So many more events are written; who waits is told when it is all of them."""
        self.answers.extend(answers)
        if self.is_over and not self.future.done():
            self.future.set_result(self.answers)

    def fail(self, error: Exception) -> None:
        """Nothing more comes of it."""
        self.failed = True
        if not self.future.done():
            self.future.set_exception(error)


@dataclass(slots=True, eq=False)
class WriteBatch:
    """One write: its rows, and for each append call the answers to give once it is done.

    ``error``: why it was not done.
    """

    change_set: ChangeSet
    answers: dict[AppendRequest, list[AppendResult]] = field(default_factory=dict)
    size: int = 0
    era: int = 0
    """`Database.era` when it was begun: what it was planned on is of that database."""
    sent: bool = False
    error: Exception | None = None
    is_aside: bool = False
    """Made in the lane (`storage.persist.commit.slow_rooms`)."""
    over: asyncio.Event | None = None
    """Set once it is written, or was not done; of a plan that is made aside."""

    def forget(self, request: AppendRequest) -> None:
        """Leave an append out of which nothing is planned here."""
        if not self.answers.get(request):
            self.answers.pop(request, None)

    def done(self, caches: WriterCaches, positions: dict[int, int]) -> None:
        """It is done: give the answers, with the positions that the events took."""
        for request, answers in self.answers.items():
            request.answer(
                [_positioned(self.change_set, caches, one, positions) for one in answers]
            )


def _positioned(
    change_set: ChangeSet, caches: WriterCaches, answer: AppendResult, positions: dict[int, int]
) -> AppendResult:
    """The answer with the position of the event, which may also be one that was still being written when this was planned."""
    if answer.event_id is None or answer.stream_ordering is not None:
        return answer
    row = change_set.rows.get(answer.event_id) or caches.rows.get(answer.event_id)
    if row is None or row.outlier:
        return answer
    position = positions.get(row.event_nid, row.stream_ordering)
    if position is None:
        return answer
    return AppendResult(
        answer.event_id, answer.outcome, answer.reason, position, row.topological_ordering
    )
