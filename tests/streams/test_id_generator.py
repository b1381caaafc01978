"""The id generator: the specification's worked example, failures, cancellation, several writers."""

import asyncio
import itertools
from collections.abc import Awaitable, Callable, Iterator

import pytest

from storage.errors import StorageCorrupt
from storage.streams import IdGenerator, Reservation, VectorPosition

Allocate = Callable[[int], Awaitable[list[int]]]


def from_sequence(numbers: Iterator[int]) -> Allocate:
    async def allocate(n: int) -> list[int]:
        return list(itertools.islice(numbers, n))

    return allocate


@pytest.fixture
def numbers() -> Iterator[int]:
    return itertools.count(2)


@pytest.fixture
def generator(numbers: Iterator[int]) -> IdGenerator:
    return IdGenerator(from_sequence(numbers))


@pytest.fixture
def shared(numbers: Iterator[int]) -> IdGenerator:
    """Writer a of three that start at 1."""
    return IdGenerator(from_sequence(numbers), "a", {"a": 1, "b": 1, "c": 1})


def currents(generator: IdGenerator) -> set[int]:
    """Return all kinds of "current": they are equal for a single writer whose ids have no gaps."""
    return {
        generator.current(),
        generator.maximum(),
        generator.linear(),
        *generator.positions().values(),
    }


async def test_the_worked_example_of_the_seed() -> None:
    generator = IdGenerator(from_sequence(itertools.count(2)), "main", {"main": 1})
    open_ones: dict[int, Reservation] = {}
    steps: list[tuple[str, int, int]] = [
        ("reserve", 2, 1),
        ("reserve", 3, 1),
        ("complete", 3, 1),
        ("complete", 2, 3),
        ("reserve", 4, 3),
        ("reserve", 5, 3),
        ("reserve", 6, 3),
        ("complete", 5, 3),
        ("complete", 4, 5),
        ("complete", 6, 6),
    ]
    assert currents(generator) == {1}
    for action, stream_id, current in steps:
        if action == "reserve":
            open_ones[stream_id] = generator.reserve()
            assert await open_ones[stream_id].__aenter__() == [stream_id]
        else:
            await open_ones.pop(stream_id).__aexit__(None, None, None)
        assert currents(generator) == {current}, (action, stream_id)
        assert generator.in_flight() == tuple(sorted(open_ones))


async def test_a_new_stream_starts_at_zero(generator: IdGenerator) -> None:
    assert currents(generator) == {0}
    assert generator.vector() == VectorPosition(0)


async def test_several_ids_complete_together(generator: IdGenerator) -> None:
    async with generator.reserve(3) as ids:
        assert ids == [2, 3, 4]
        assert generator.current() == 0
    assert currents(generator) == {4}


async def test_an_exception_completes_and_passes_through(generator: IdGenerator) -> None:
    with pytest.raises(RuntimeError, match="rolled back"):
        async with generator.reserve():
            raise RuntimeError("rolled back")
    assert currents(generator) == {2}


async def test_minimum_and_maximum_differ_where_ids_are_missing() -> None:
    """Another writer took 3 to 9 and is at 5: writer a, with 10 in flight, is from 2 to 5."""
    generator = IdGenerator(from_sequence(iter([2, 10])), "a", {"a": 1, "b": 1})
    async with generator.reserve():
        pass
    async with generator.reserve():
        generator.advance("b", 5)
        assert (generator.current(), generator.maximum(), generator.linear()) == (2, 5, 5)
        generator.advance("b", 12)
        assert (generator.current(), generator.maximum(), generator.linear()) == (2, 5, 5)
    assert (generator.current(), generator.maximum(), generator.linear()) == (10, 12, 12)


async def test_ids_without_a_gap_move_the_linear_position_past_an_idle_writer(
    shared: IdGenerator,
) -> None:
    """Writer c has said nothing since 1, but 2 and 3 have owners, so they cannot be c's."""
    async with shared.reserve():
        assert shared.linear() == 1
    assert shared.linear() == 2
    shared.advance("b", 3)
    assert shared.linear() == 3
    shared.advance("b", 5)  # 4 may be c's
    assert shared.linear() == 3
    assert shared.vector() == VectorPosition(3, (("b", 5),))
    shared.advance("c", 4)
    assert shared.linear() == 5
    assert shared.vector() == VectorPosition(5)


async def test_an_older_position_changes_nothing(shared: IdGenerator) -> None:
    shared.advance("b", 9)
    before = shared.positions(), shared.linear()
    shared.advance("b", 4)
    assert (shared.positions(), shared.linear()) == before


async def test_a_writer_is_added_and_removed(shared: IdGenerator) -> None:
    shared.advance("b", 9)
    shared.advance("d", 8)
    assert shared.positions() == {"a": 1, "b": 9, "c": 1, "d": 8}
    assert shared.linear() == 1
    shared.remove_writer("c")
    assert shared.linear() == 9  # up to 8 by the positions of b and d, and 9 is b's
    assert shared.positions() == {"a": 1, "b": 9, "d": 8}
    with pytest.raises(KeyError):
        shared.current("c")
    with pytest.raises(ValueError, match="writer of this generator"):
        shared.remove_writer("a")


async def test_an_announcement_of_this_writer_itself_does_not_pass_what_is_in_flight(
    shared: IdGenerator,
) -> None:
    async with shared.reserve():
        shared.advance("a", 5)
        assert (shared.current(), shared.linear()) == (1, 1)
    shared.advance("a", 9)
    assert shared.current() == 9
    with pytest.raises(StorageCorrupt):
        async with shared.reserve():
            pytest.fail("3 was announced as completed")


async def test_an_id_in_flight_is_not_completed_by_an_announcement_of_itself(
    shared: IdGenerator,
) -> None:
    """An echo of this writer's position may name an id in flight.

    That id is not complete before its block ends.
    """
    async with shared.reserve() as ids:
        shared.advance("a", ids[0], completed=False)
        assert shared.current() == ids[0] - 1
        assert shared.maximum() == ids[0] - 1
        assert shared.linear() == ids[0] - 1
    assert shared.current() == ids[0]


async def test_ids_of_two_reservations_may_alternate() -> None:
    """Two calls of the sequence ran at the same time."""
    both_called = asyncio.Barrier(2)
    answers = iter([[2, 4], [3]])

    async def allocate(_n: int) -> list[int]:
        answer = next(answers)
        await both_called.wait()
        return answer

    generator = IdGenerator(allocate)
    outer, inner = generator.reserve(2), generator.reserve()
    entered = await asyncio.gather(outer.__aenter__(), inner.__aenter__())
    assert list(entered) == [[2, 4], [3]]
    await inner.__aexit__(None, None, None)
    assert currents(generator) == {0}
    await outer.__aexit__(None, None, None)
    assert currents(generator) == {4}


async def test_what_the_linear_position_has_passed_bounds_every_maximum(
    shared: IdGenerator,
) -> None:
    """Writer b has said nothing since 1, but 2 is this writer's: b is somewhere from 1 to 2."""
    async with shared.reserve():
        pass
    assert (shared.current("b"), shared.maximum("b")) == (1, 2)


async def test_memory_does_not_grow_with_the_stream(shared: IdGenerator) -> None:
    for last in range(2, 600, 5):  # two ids of each five were rolled back elsewhere
        async with shared.reserve():
            pass
        shared._allocate = from_sequence(itertools.count(last + 5))
        shared.advance("b", last + 1)
        shared.advance("c", last + 2)
    assert shared.linear() == last + 2
    assert (len(shared._completed), shared._own_completed, shared._open) == (1, [], set())


async def test_ten_writers_of_which_one_is_busy(numbers: Iterator[int]) -> None:
    """Idle writers announce their maximum, so the linear position of all follows the busy one."""
    names = [f"w{i}" for i in range(10)]
    generators = {
        name: IdGenerator(from_sequence(numbers), name, dict.fromkeys(names, 1)) for name in names
    }

    def announce(name: str) -> None:
        for other in names:
            if other != name:
                generators[other].advance(name, generators[name].maximum())

    for _ in range(100):
        async with generators["w0"].reserve(7):
            pass
        announce("w0")
    for name in names[1:]:
        announce(name)
    assert {generator.linear() for generator in generators.values()} == {701}


class Gate:
    """A sequence whose answers are let through one by one."""

    def __init__(self) -> None:
        self.numbers = itertools.count(2)
        self.waiting: list[asyncio.Future[None]] = []
        self.called = asyncio.Event()

    async def allocate(self, n: int) -> list[int]:
        ids = list(itertools.islice(self.numbers, n))
        answer = asyncio.get_running_loop().create_future()
        self.waiting.append(answer)
        self.called.set()
        await answer
        return ids


async def hold(generator: IdGenerator, entered: asyncio.Event, leave: asyncio.Event) -> None:
    async with generator.reserve():
        entered.set()
        await leave.wait()


async def start(
    gate: Gate, generator: IdGenerator
) -> tuple[asyncio.Task[None], asyncio.Event, asyncio.Event]:
    entered, leave = asyncio.Event(), asyncio.Event()
    gate.called.clear()
    task = asyncio.create_task(hold(generator, entered, leave))
    await gate.called.wait()
    return task, entered, leave


async def test_an_id_that_is_on_its_way_holds_the_position() -> None:
    """Id 2 was taken from the sequence first but arrives last.

    3 completes, and another writer's 4, and neither may pass it.
    """
    gate = Gate()
    generator = IdGenerator(gate.allocate, "a", {"a": 1, "b": 1})
    first, first_entered, first_leave = await start(gate, generator)
    second, _, second_leave = await start(gate, generator)
    second_leave.set()
    gate.waiting[1].set_result(None)
    await second
    generator.advance("b", 4)
    assert (generator.current(), generator.maximum(), generator.linear()) == (1, 1, 1)
    gate.waiting[0].set_result(None)
    await first_entered.wait()
    assert generator.in_flight() == (2,)
    assert (generator.current(), generator.maximum(), generator.linear()) == (1, 1, 1)
    first_leave.set()
    await first
    assert (generator.current(), generator.maximum(), generator.linear()) == (3, 4, 4)


async def test_cancelled_while_the_id_is_on_its_way() -> None:
    gate = Gate()
    generator = IdGenerator(gate.allocate)
    first, first_entered, _ = await start(gate, generator)
    second, _, second_leave = await start(gate, generator)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert not first_entered.is_set()
    second_leave.set()
    gate.waiting[1].set_result(None)
    await second
    assert currents(generator) == {3}


async def test_cancelled_when_the_answer_is_already_there() -> None:
    """Result and cancellation arrive in one loop turn: whichever wins, no id stays in flight."""
    gate = Gate()
    generator = IdGenerator(gate.allocate)
    for answer_first in (True, False):
        task, _, _ = await start(gate, generator)
        if answer_first:
            gate.waiting[-1].set_result(None)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert generator.in_flight() == ()
    task, _, leave = await start(gate, generator)
    gate.waiting[-1].set_result(None)
    leave.set()
    await task
    assert currents(generator) == {4}


async def test_cancelled_inside_the_block() -> None:
    gate = Gate()
    generator = IdGenerator(gate.allocate)
    task, entered, _ = await start(gate, generator)
    gate.waiting[0].set_result(None)
    await entered.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert currents(generator) == {2}


async def test_a_deadline_while_the_id_is_on_its_way() -> None:
    gate = Gate()
    generator = IdGenerator(gate.allocate)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(hold(generator, asyncio.Event(), asyncio.Event()), 0.01)
    task, _, leave = await start(gate, generator)
    gate.waiting[-1].set_result(None)
    leave.set()
    await task
    assert generator.current() == next(gate.numbers) - 1


async def test_a_sequence_that_fails_leaves_nothing_in_flight(numbers: Iterator[int]) -> None:
    failures = iter([ConnectionError("lost")])
    sequence = from_sequence(numbers)

    async def allocate(n: int) -> list[int]:
        for failure in failures:
            raise failure
        return await sequence(n)

    generator = IdGenerator(allocate)
    with pytest.raises(ConnectionError):
        async with generator.reserve():
            pytest.fail("no id was allocated")
    async with generator.reserve() as ids:
        assert generator.in_flight() == tuple(ids)
    assert currents(generator) == {2}


@pytest.mark.parametrize("answer", [[], [5], [6, 5], [5, 5], [5, 6, 7]], ids=str)
async def test_an_answer_that_is_not_n_increasing_ids_is_refused(answer: list[int]) -> None:
    generator = IdGenerator(from_sequence(iter(answer)))
    generator._allocate = lambda _: from_sequence(iter(answer))(9)
    with pytest.raises(StorageCorrupt, match="not 2 increasing stream ids"):
        async with generator.reserve(2):
            pytest.fail("the ids were wrong")
    assert generator.in_flight() == ()


async def test_a_sequence_behind_its_table_is_refused() -> None:
    """After a restore the sequence returns ids again that are in the table.

    Readers are past them and would skip the facts.
    """
    generator = IdGenerator(from_sequence(itertools.count(40)), "main", {"main": 53})
    with pytest.raises(StorageCorrupt, match="behind its table") as caught:
        async with generator.reserve():
            pytest.fail("40 was used before")
    assert caught.value.ids == {"writer": "main", "allocated": (40,), "used": 53}
    assert currents(generator) == {53}


async def test_a_reservation_is_for_at_least_one_id_and_for_one_use(generator: IdGenerator) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        generator.reserve(0)
    reservation = generator.reserve()
    async with reservation:
        pass
    with pytest.raises(RuntimeError, match="only once"):
        async with reservation:
            pytest.fail("entered twice")
    assert currents(generator) == {2}


async def test_what_is_held_keeps_ids_of_others_from_counting_as_completed(
    generator: IdGenerator,
) -> None:
    """While a statement takes ids by itself, none above the largest known id has completed."""
    generator.advance("b", 5)
    busy = [generator.is_busy]
    with generator.holding():
        generator.advance("b", 9)
        busy.append(generator.is_busy)
        assert (generator.current("b"), generator.maximum(), generator.linear()) == (9, 5, 5)
    assert [*busy, generator.is_busy] == [False, True, False]
    assert (generator.maximum(), generator.linear()) == (9, 9)


async def test_what_is_held_cannot_be_entered(generator: IdGenerator) -> None:
    held = generator.hold()
    with pytest.raises(RuntimeError, match="a reservation can be entered only once"):
        await held.__aenter__()
    generator.let_go(held)
