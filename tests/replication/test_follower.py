# ruff: noqa: ARG002 - the log has the follower's target's interface
"""The follower, compared with a log that is read directly.

Cases: random advances, links that break anywhere, batches, holes, pages.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from itertools import groupby
from typing import Final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import DatabaseUnavailable, ProtocolError
from storage.replication import transport
from storage.replication.commands import Command, Position, Rdata, parse
from storage.replication.follower import Follower
from storage.replication.peer import advance_commands, positions
from storage.replication.transport import ReplicationLimits
from storage.streams.feed import Advance, StreamRow

SMALL: Final = ReplicationLimits(
    page_rows_max=3, batch_rows_max=4, retry_ms_first=0, retry_ms_max=0
)
WRITERS = ("a", "b")


@pytest.fixture(autouse=True)
def small_pages(quick: None) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "LIMITS", SMALL)
        yield


class LinesOnTheirWay:
    name = "link"

    def __init__(self) -> None:
        self.refused: asyncio.Queue[str] = asyncio.Queue()

    def send(self, *commands: Command) -> None:
        raise AssertionError(f"a follower says nothing: {commands}")

    def silent_s(self) -> float:
        return 0.0

    def refuse(self, reason: str) -> None:
        self.refused.put_nowait(reason)


class Log:
    """The facts of two writers in one stream: the follower's table and target at the same time."""

    def __init__(self) -> None:
        self.facts: list[StreamRow] = []
        self.at = dict.fromkeys(WRITERS, 0)
        self.seen: dict[str, list[StreamRow]] = {writer: [] for writer in WRITERS}
        self.known = dict.fromkeys(WRITERS, 0)
        self.failures = 0
        self.moved = asyncio.Event()

    def positions(self) -> dict[str, int]:
        return self.at

    def write(self, writer: str, counts: list[int]) -> Advance:
        """One id for each count, with so many rows; 0 is an id that came to nothing."""
        before, last = self.at[writer], max(self.at.values())
        facts = [
            StreamRow(last + number, writer, [number, row])
            for number, count in enumerate(counts, 1)
            for row in range(count)
        ]
        self.facts += facts
        self.at[writer] = last + len(counts)
        return Advance("s", writer, before, self.at[writer], facts)

    def follows(self, stream_name: str, instance_name: str) -> bool:
        return stream_name == "s" and instance_name in WRITERS

    def position(self, stream_name: str, instance_name: str) -> int:
        return self.known[instance_name]

    def leaps(self, stream_name: str, instance_name: str, token: int) -> bool:
        return False

    def check(self, stream_name: str, row: object) -> None:
        if not isinstance(row, list):
            raise ProtocolError("no list")

    async def rows(
        self, stream_name: str, instance_name: str, after: int, upto: int, limit: int
    ) -> list[StreamRow]:
        await asyncio.sleep(0)
        if self.failures:
            self.failures -= 1
            raise DatabaseUnavailable("away")
        return [
            fact
            for fact in self.facts
            if fact.instance_name == instance_name and after < fact.stream_id <= upto
        ][:limit]

    def advance(
        self, stream_name: str, instance_name: str, current: int, rows: list[StreamRow]
    ) -> None:
        assert self.known[instance_name] < current <= self.at[instance_name]
        assert all(self.known[instance_name] < fact.stream_id <= current for fact in rows)
        self.known[instance_name] = current
        self.seen[instance_name] += rows
        self.moved.set()

    def check_complete(self) -> None:
        assert self.known == self.at
        assert self.seen == {
            writer: [fact for fact in self.facts if fact.instance_name == writer]
            for writer in WRITERS
        }


def tell(follower: Follower, command: Command, link: LinesOnTheirWay) -> None:
    command = parse(str(command))
    if isinstance(command, Rdata):
        follower.rdata(command, link)
    elif isinstance(command, Position):
        follower.position(command, link)


async def settle(log: Log) -> None:
    async with asyncio.timeout(60):
        while log.known != log.at:
            log.moved.clear()
            await log.moved.wait()


class FollowerScene:
    """One follower and two links, each with lines on their way to it."""

    def __init__(self) -> None:
        self.log = Log()
        self.follower = Follower(self.log)
        self.links = [LinesOnTheirWay(), LinesOnTheirWay()]
        self.lines: list[list[Command]] = [[], []]

    async def write(self, writer: str, counts: list[int]) -> None:
        told = list(advance_commands(self.log.write(writer, counts)))
        for waiting in self.lines:
            waiting.extend(told)

    async def deliver(self, number: int, count: int) -> None:
        for command in self.lines[number][:count]:
            tell(self.follower, command, self.links[number])
        del self.lines[number][:count]

    async def break_off(self, number: int) -> None:
        """What is on its way is lost; the new link begins with the positions."""
        self.follower.lost(self.links[number])
        self.links[number], self.lines[number] = LinesOnTheirWay(), list(positions({"s": self.log}))

    async def fail(self, count: int) -> None:
        """The next reads of the table do."""
        self.log.failures += count

    async def wait(self, turns: int) -> None:
        for _ in range(turns):
            await asyncio.sleep(0)

    async def end(self) -> None:
        """All that is on its way arrives."""
        for number in (0, 1):
            await self.deliver(number, len(self.lines[number]))
            for command in positions({"s": self.log}):
                tell(self.follower, command, self.links[number])
        await settle(self.log)
        await self.follower.close()


class SharedLinkScene(FollowerScene):
    """One link with two senders of the same facts: the writers, and one that reads the tables."""

    def __init__(self) -> None:
        super().__init__()
        self.follower = Follower(self.log, is_shared=True)
        self.links[1] = self.links[0]
        self.lines = [list(positions({"s": self.log})) for _ in self.links]

    async def write(self, writer: str, counts: list[int]) -> None:
        advance = self.log.write(writer, counts)
        for waiting, batches in zip(self.lines, (True, False), strict=True):
            waiting.extend(advance_commands(advance, batches=batches))

    async def break_off(self, number: int) -> None:
        """A sender comes back; the others have noticed nothing."""
        self.lines[number] = list(positions({"s": self.log}))


Step = tuple[Callable[..., Awaitable[None]], tuple[object, ...]]
steps: st.SearchStrategy[Step] = st.one_of(
    st.tuples(
        st.just(FollowerScene.write),
        st.tuples(st.sampled_from(WRITERS), st.lists(st.integers(0, 7), min_size=1, max_size=5)),
    ),
    st.tuples(st.just(FollowerScene.deliver), st.tuples(st.integers(0, 1), st.integers(1, 6))),
    st.tuples(st.just(FollowerScene.break_off), st.tuples(st.integers(0, 1))),
    st.tuples(st.just(FollowerScene.fail), st.tuples(st.integers(1, 2))),
    st.tuples(st.just(FollowerScene.wait), st.tuples(st.integers(1, 5))),
)


@pytest.mark.parametrize("make_scene", [FollowerScene, SharedLinkScene])
@given(plan=st.lists(steps, max_size=40))
def test_every_fact_once_in_order_however_links_behave(
    make_scene: type[FollowerScene], plan: list[Step]
) -> None:
    async def play() -> None:
        scene = make_scene()
        for step, arguments in plan:
            await getattr(scene, step.__name__)(*arguments)
        await scene.end()
        scene.log.check_complete()
        assert all(link.refused.empty() for link in scene.links)

    asyncio.run(play())


async def test_a_second_sender_repeats_a_row_within_a_batch_of_the_writer() -> None:
    scene = SharedLinkScene()
    for number in (0, 1):
        await scene.deliver(number, len(WRITERS))
    await scene.write("a", [1, 2])
    await scene.deliver(0, 2)
    await scene.deliver(1, 1)
    await scene.deliver(0, 1)
    await scene.end()
    scene.log.check_complete()


@pytest.mark.parametrize("entered_at", [2, 5])
async def test_who_learns_of_a_writer_does_not_know_how_far_it_is(entered_at: int) -> None:
    """A writer was killed between two commits and their lines; it comes back."""
    scene = SharedLinkScene()
    [link, _], log = scene.links, scene.log
    log.write("a", [0] * entered_at)
    log.known["a"] = 2
    log.write("a", [1, 1])
    tell(scene.follower, Position("s", "a", 0, entered_at), link)
    for command in advance_commands(log.write("a", [1])):
        tell(scene.follower, command, link)
    await settle(log)
    log.check_complete()


async def test_a_page_may_end_in_the_middle_of_an_id() -> None:
    log, link = Log(), LinesOnTheirWay()
    log.write("a", [2, 9, 1, 0, 2, 2])
    follower = Follower(log)
    tell(follower, Position("s", "a", 6, 6), link)
    await settle(log)
    log.check_complete()


async def test_a_position_within_a_batch_means_that_some_of_it_was_lost() -> None:
    log, link = Log(), LinesOnTheirWay()
    follower = Follower(log)
    tell(follower, Position("s", "a", 0, 0), link)
    first, *_, last = advance_commands(log.write("a", [3]))
    for command in (first, Position("s", "a", 0, 0), last):
        tell(follower, command, link)
    await settle(log)
    log.check_complete()


async def test_an_old_position_while_a_hole_is_filled() -> None:
    log, link = Log(), LinesOnTheirWay()
    follower = Follower(log)
    log.write("a", [1] * 9)
    more = advance_commands(log.write("a", [1]))
    for command in (Position("s", "a", 9, 9), Position("s", "a", 0, 0), *more):
        tell(follower, command, link)
    await settle(log)
    log.check_complete()


async def test_a_batch_that_is_too_large_to_keep_is_read_from_the_table() -> None:
    log, link = Log(), LinesOnTheirWay()
    follower = Follower(log)
    tell(follower, Position("s", "a", 0, 0), link)
    for command in advance_commands(log.write("a", [50])):
        tell(follower, command, link)
    await settle(log)
    log.check_complete()


async def test_a_failure_that_is_not_the_databases_ends_the_link() -> None:
    class Broken(Log):
        async def rows(
            self, stream_name: str, instance_name: str, after: int, upto: int, limit: int
        ) -> list[StreamRow]:
            raise RuntimeError("a defect")

    log, link = Broken(), LinesOnTheirWay()
    log.write("a", [1])
    follower = Follower(log)
    tell(follower, Position("s", "a", 1, 1), link)
    assert await link.refused.get() == "rows of s by a could not be fetched"
    await follower.close()


# --------------------------------------------------------------------------------------------------
# announcing

counts_of_rows = st.lists(st.integers(0, 4), min_size=1, max_size=8)


@given(st.integers(0, 100), counts_of_rows)
def test_an_advance_is_told_without_gaps(previous: int, counts: list[int]) -> None:
    """Each token leaves no gap to the one before; batches end with the token of their facts."""
    facts = [
        StreamRow(previous + number, "w", [row])
        for number, count in enumerate(counts, 1)
        for row in range(count)
    ]
    told, batch = previous, []
    rows: list[StreamRow] = []
    for command in advance_commands(Advance("s", "w", previous, previous + len(counts), facts)):
        if isinstance(command, Position):
            assert command.prev_token == told
            assert not any(told < fact.stream_id <= command.new_token for fact in facts)
            told = command.new_token
        else:
            assert isinstance(command, Rdata)
            batch.append(command.row)
            if command.token is not None:
                assert told < command.token
                told = command.token
                rows += [StreamRow(told, "w", row) for row in batch]
                batch = []
    assert told == previous + len(counts)
    assert rows == facts
    assert batch == []


def test_facts_outside_of_an_advance_are_not_told() -> None:
    facts = [StreamRow(number, "w", [number]) for number in (3, 4, 5, 6, 7)]
    told = [str(command) for command in advance_commands(Advance("s", "w", 4, 6, facts))]
    assert told == ["RDATA s w 5 [5]", "RDATA s w 6 [6]"]


def test_rows_that_share_an_id_are_told_or_left_out_together() -> None:
    facts = [StreamRow(5, "w", ["a"]), StreamRow(5, "w", ["x" * 20_000]), StreamRow(6, "w", ["b"])]
    told = [str(command) for command in advance_commands(Advance("s", "w", 4, 6, facts))]
    assert told == ["POSITION s w 5 5", 'RDATA s w 6 ["b"]']
    assert [key for key, _ in groupby(line.split()[0] for line in told)] == ["POSITION", "RDATA"]
