"""What the writer has in hand: append calls, and the plans that hold their events."""

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from storage.persist.context import Caches
from storage.persist.draft import Draft
from storage.persist.plan import Incoming
from storage.persist.results import AppendResult


@dataclass(slots=True, eq=False)
class Job:
    """One append call on its way. ``planned``: how many of its events are in a plan; ``answers``: of those that are written."""

    incoming: Sequence[Incoming]
    future: asyncio.Future[list[AppendResult]]
    planned: int = 0
    answers: list[AppendResult] = field(default_factory=list)
    failed: bool = False
    caller: Any = None
    """The span it is made for, if somebody traces."""

    @property
    def rest(self) -> Sequence[Incoming]:
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
class Plan:
    """One write: its rows, and for each append call the answers to give once it is done. ``error``: why it was not done."""

    draft: Draft
    answers: dict[Job, list[AppendResult]] = field(default_factory=dict)
    size: int = 0
    sent: bool = False
    error: Exception | None = None

    def done(self, caches: Caches, positions: dict[int, int]) -> None:
        """It is done: give the answers, with the positions that the events took."""
        for job, answers in self.answers.items():
            job.answer([_positioned(self.draft, caches, one, positions) for one in answers])


def _positioned(draft: Draft, caches: Caches, answer: AppendResult, positions: dict[int, int]) -> AppendResult:
    """The answer with the position of the event, which may also be one that was still being written when this was planned."""
    if answer.event_id is None or answer.stream_ordering is not None:
        return answer
    row = draft.rows.get(answer.event_id) or caches.rows.get(answer.event_id)
    if row is None or row.outlier:
        return answer
    position = positions.get(row.event_nid, row.stream_ordering)
    if position is None:
        return answer
    return AppendResult(answer.event_id, answer.outcome, answer.reason, position, row.topological_ordering)
