"""Random histories of one to five writers against the seed's definitions, read aloud.

The world knows every fact: who added it and whether it has completed. After each step every
generator is asked for all its currents. Coroutines are stepped by hand, so that every interleaving
of reserve, answer of the sequence, complete, fail, cancel, announcement, crash and restart can be
drawn, without an event loop and without time.
"""

import asyncio
import os
from collections.abc import Coroutine, Generator
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from storage.streams import IdGenerator

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "100"))


class GeneratorStep:
    """Awaiting it gives control to the machine; what the machine sends is the result."""

    def __await__(self) -> Generator[None, Any, Any]:
        return (yield)


async def from_sequence(_n: int) -> list[int]:
    ids: list[int] = await GeneratorStep()
    return ids


async def use(generator: IdGenerator, n: int) -> None:
    async with generator.reserve(n):
        await GeneratorStep()


@dataclass
class Reserving:
    """One `async with generator.reserve(n)` on its way."""

    writer: str
    n: int
    coroutine: Coroutine[Any, Any, None]
    taken: list[int] = field(default_factory=list)  # by nextval
    inside: bool = False  # the ids have reached the caller


class ModelWriters(RuleBasedStateMachine):
    kind: type[IdGenerator] = IdGenerator

    @initialize(count=st.integers(1, 5), start=st.integers(0, 3))
    def start_writers(self, count: int, start: int) -> None:
        self.names = [f"w{i}" for i in range(count)]
        self.first_id = self.next_id = start + 1
        self.facts: dict[int, str] = {}  # every id that was handed to a writer, and whose it is
        self.unfinished: set[int] = set()
        self.uses: list[Reserving] = []
        self.announcements: list[tuple[str, str, int]] = []  # (from, to, position), on their way
        self.generators = {
            name: self.kind(from_sequence, name, dict.fromkeys(self.names, start))
            for name in self.names
        }
        self.written = dict.fromkeys(self.names, start)  # the positions in the database
        self.told = {
            name: set(self.written.values()) for name in self.names
        }  # ids that each knows to have completed
        self.begun = dict(self.written)  # the position of each writer when its process started
        self.seen: dict[str, dict[str, int]] = {name: {} for name in self.names}

    def pick(self, data: st.DataObject, *, inside: bool) -> Reserving:
        return data.draw(st.sampled_from([use for use in self.uses if use.inside == inside]))

    @rule(
        data=st.data(),
        n=st.integers(1, 3),
        reached=st.sampled_from(["asked", "taken", "inside", "inside"]),
    )
    def reserve(self, data: st.DataObject, n: int, reached: str) -> None:
        writer = data.draw(st.sampled_from(self.names))
        started = Reserving(writer, n, use(self.generators[writer], n))
        started.coroutine.send(None)
        self.uses.append(started)
        if reached != "asked":
            self.take(started)
        if reached == "inside":
            self.enter(started)

    @precondition(lambda self: any(not use.inside for use in self.uses))
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        goes = self.pick(data, inside=False)
        if goes.taken:
            self.enter(goes)
        else:
            self.take(goes)

    def take(self, taker: Reserving) -> None:
        """The sequence gives ids; they are not with the caller yet."""
        taker.taken = list(range(self.next_id, self.next_id + taker.n))
        self.next_id += taker.n
        self.facts.update(dict.fromkeys(taker.taken, taker.writer))
        self.unfinished.update(taker.taken)

    def enter(self, taker: Reserving) -> None:
        taker.coroutine.send(taker.taken)
        taker.inside = True

    @precondition(lambda self: any(not use.inside for use in self.uses))
    @rule(data=st.data(), error=st.sampled_from([asyncio.CancelledError(), ConnectionError()]))
    def lose_the_sequence(self, data: st.DataObject, error: BaseException) -> None:
        self.end(self.pick(data, inside=False), error)

    @precondition(lambda self: any(use.inside for use in self.uses))
    @rule(
        data=st.data(),
        error=st.sampled_from([None, None, asyncio.CancelledError(), RuntimeError()]),
    )
    def complete(self, data: st.DataObject, error: BaseException | None) -> None:
        self.end(self.pick(data, inside=True), error)

    def end(self, ended: Reserving, error: BaseException | None) -> None:
        self.uses.remove(ended)
        self.unfinished.difference_update(ended.taken)
        if ended.inside:
            self.told[ended.writer].update(ended.taken)
        if error is None:
            with pytest.raises(StopIteration):
                ended.coroutine.send(None)
        else:
            with pytest.raises(type(error)):
                ended.coroutine.throw(error)
        self.written[ended.writer] = self.generators[ended.writer].maximum()

    @precondition(lambda self: len(self.names) > 1)
    @rule(data=st.data(), maximum=st.booleans())
    def announce(self, data: st.DataObject, maximum: bool) -> None:
        writer, reader = data.draw(st.permutations(self.names))[:2]
        generator = self.generators[writer]
        self.announcements.append(
            (writer, reader, generator.maximum() if maximum else generator.current())
        )

    @precondition(lambda self: self.announcements)
    @rule(data=st.data())
    def hear(self, data: st.DataObject) -> None:
        """Announcements may overtake each other, and be heard again."""
        self.deliver(*data.draw(st.sampled_from(self.announcements)))

    def deliver(self, writer: str, reader: str, position: int) -> None:
        self.generators[reader].advance(writer, position)
        self.told[reader].add(position)

    @rule(data=st.data())
    def crash_and_restart(self, data: st.DataObject) -> None:
        """Roll back what was in flight; the new process has only the positions in the database."""
        writer = data.draw(st.sampled_from(self.names))
        for lost in [use for use in self.uses if use.writer == writer]:
            self.uses.remove(lost)
            self.unfinished.difference_update(lost.taken)
            lost.coroutine.close()
        self.generators[writer] = self.kind(from_sequence, writer, self.written)
        self.told[writer] = set(self.written.values())
        self.begun[writer] = self.written[writer]
        self.seen[writer] = {}

    def in_flight(self, writer: str) -> list[int]:
        return sorted(stream_id for stream_id in self.unfinished if self.facts[stream_id] == writer)

    @invariant()
    def no_current_reaches_an_id_in_flight(self) -> None:
        for generator in self.generators.values():
            assert all(stream_id > generator.linear() for stream_id in self.unfinished)
            for writer in self.names:
                assert generator.current(writer) <= generator.maximum(writer)
                assert all(
                    stream_id > generator.maximum(writer) for stream_id in self.in_flight(writer)
                )

    @invariant()
    def every_current_is_monotonic(self) -> None:
        for name, generator in self.generators.items():
            now = {
                "linear": generator.linear(),
                **{f"current {w}": generator.current(w) for w in self.names},
            }
            now |= {f"maximum {w}": generator.maximum(w) for w in self.names}
            assert all(now[what] >= before for what, before in self.seen[name].items())
            self.seen[name] = now

    @invariant()
    def the_currents_are_the_largest_that_the_writer_can_know(self) -> None:
        """Check the definitions of "current" by what this process knows.

        An id not yet returned may be any unknown number.
        """
        for name, generator in self.generators.items():
            told = self.told[name]
            if any(use.writer == name and not use.inside for use in self.uses):
                continue
            mine = self.in_flight(name)
            largest = max(t for t in told if all(stream_id > t for stream_id in mine))
            assert generator.maximum() == max(largest, generator.linear())
            assert generator.current() == max([self.begun[name], *self.own_completed(name, mine)])
            assert generator.linear() >= max(
                t for t in told if self.all_completed_up_to(t, name, mine)
            )

    def own_completed(self, name: str, mine: list[int]) -> list[int]:
        return [
            t
            for t in self.told[name]
            if self.facts.get(t) == name and all(stream_id > t for stream_id in mine)
        ]

    def all_completed_up_to(self, t: int, name: str, mine: list[int]) -> bool:
        positions = self.generators[name].positions()
        others = [positions[writer] for writer in self.names if writer != name]
        return all(
            stream_id in self.told[name]
            or (stream_id not in mine and all(stream_id <= position for position in others))
            for stream_id in range(self.first_id, t + 1)
        )

    def teardown(self) -> None:
        """When all ended and announced twice, all agree, and no idle writer holds another back."""
        if not hasattr(self, "names"):
            return
        for ended in list(self.uses):
            self.end(ended, None if ended.inside else asyncio.CancelledError())
        for _ in range(2):
            for writer in self.names:
                for reader in self.names:
                    if reader != writer:
                        self.deliver(writer, reader, self.generators[writer].maximum())
        last = max(max(told) for told in self.told.values())
        for generator in self.generators.values():
            assert generator.linear() == last
            assert generator.in_flight() == ()
            assert all(
                generator.vector().covers(writer, stream_id)
                for stream_id, writer in self.facts.items()
                if stream_id <= last
            )


class LastCompleted(IdGenerator):
    """The naive generator: the current id is the last one that completed."""

    def _bound(self) -> int:
        return self._largest_known


class ForgetsWhatIsOnItsWay(IdGenerator):
    """A nearly right generator: it checks the ids that it has, not those that it has requested."""

    def _bound(self) -> int:
        return min(
            (reservation.bound for reservation in self._open if reservation.ids),
            default=self._largest_known,
        )


def machine_for(generator: type[IdGenerator]) -> type[ModelWriters]:
    return type(f"Writers{generator.__name__}", (ModelWriters,), {"kind": generator})


def test_random_histories() -> None:
    run_state_machine_as_test(
        ModelWriters,
        settings=settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None),
    )


@pytest.mark.parametrize("generator", [LastCompleted, ForgetsWhatIsOnItsWay])
def test_naive_generators_fail_the_same_check(generator: type[IdGenerator]) -> None:
    quiet = settings(
        max_examples=1000,
        stateful_step_count=40,
        deadline=None,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine_for(generator), settings=quiet)
