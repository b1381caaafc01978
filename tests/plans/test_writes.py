"""A write touches as many rows in a room of 16,000 events as in one of 1,000, in every state.

Each write is planned by a process that has nothing in its caches, so all loads of planning run.
`STORAGE_PLAN_EVENTS` sets the size of the large room; `make soak` sets a million.
"""

import os
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack

import pytest

import storage
from benchmarks.crowd import DEPTH_MS, EVERYWHERE, FIRST_MS, SERVER, STEP_MS, VERSION, Pen
from benchmarks.statistics_states import BY_NAME, MEMBER, BigRoom, StatesServer
from storage import Store
from storage.ids import EventId, RoomId, UserId
from storage.streams import stream_rows
from storage.streams.positions import LARGEST_POSITION
from storage.testing import signing_key
from tests.persist.writing import QUIET
from tests.plans.chosen import few_states_of
from tests.plans.recording import PlanRecorder, Touched

pytestmark = [
    pytest.mark.xdist_group("plans-writes"),
    pytest.mark.timeout(600),
]

SMALL = 1_000
LARGE = int(os.environ.get("STORAGE_PLAN_EVENTS", "16000"))
LATE_MS = FIRST_MS + DEPTH_MS + STEP_MS * 10**9


class WriteCases:
    """The writes of the test, each by its name."""

    def __init__(self, store: Store, room: BigRoom) -> None:
        self.store = store
        self.room = room
        self.pen: Pen = room.pen

    def message(self, prev: Iterable[str] = (), content: str = '{"body":"x"}') -> bytes:
        auth = [self.pen.auth["m.room.create", ""], self.pen.auth["m.room.power_levels", ""]]
        auth.append(self.pen.auth["m.room.member", MEMBER])
        ts = LATE_MS + self.pen.depth
        return self.pen.write(MEMBER, "m.room.message", auth, (content, "{}"), ts=ts, prev=[*prev])[
            1
        ]

    def name(self, text: str, prev: Iterable[str] = ()) -> bytes:
        return self.pen.state(EVERYWHERE, "m.room.name", {"name": text}, cited=False, prev=[*prev])

    async def append(self, *pdus: bytes, outcome: str = "stored", **options: object) -> None:
        self.store.writer.caches.forget()
        results = await self.store.append(pdus, room_version=VERSION, **options)  # type: ignore[arg-type]
        assert {result.outcome for result in results} == {outcome}, results

    async def one_message(self) -> None:
        await self.append(self.message())

    async def join(self) -> None:
        await self.append(self.pen.join(f"@somebody{self.pen.depth}:{SERVER}"))

    async def batch(self) -> None:
        pdus = []
        for number in range(25):
            pdus += [self.message(), self.message(), self.name(f"name {number}")]
            pdus.append(self.pen.join(f"@other{self.pen.depth}:h{number}.test"))
        await self.append(*pdus)

    async def merge(self) -> None:
        tip = str(self.pen.tip)
        await self.append(self.name("left", [tip]), self.message())
        left = str(self.pen.tip)
        await self.append(self.name("right", [tip]))
        await self.append(self.message([left, str(self.pen.tip)]))

    async def deep_fork(self) -> None:
        tip = str(self.pen.tip)
        await self.append(self.name("from the middle", [self.room.middle_id]))
        await self.append(self.message([tip, str(self.pen.tip)]))

    async def power_levels(self) -> None:
        """Both branches change who may do what: a resolution that walks the auth events."""
        tip = str(self.pen.tip)
        levels = {"users": {EVERYWHERE: 100, MEMBER: 50}}
        await self.append(
            self.pen.state(EVERYWHERE, "m.room.power_levels", levels, cited=False, prev=[tip])
        )
        left = str(self.pen.tip)
        await self.append(
            self.pen.state(
                EVERYWHERE, "m.room.power_levels", levels | {"invite": 10}, cited=False, prev=[tip]
            )
        )
        await self.append(self.message([left, str(self.pen.tip)]))

    async def gap(self) -> None:
        """An event whose parent comes by backfill."""
        lost = self.message()
        lost_id = str(self.pen.tip)
        state = [EventId(one) for one in self.pen.auth.values()]
        child = self.message([lost_id])
        await self.append(child, outcome="missing_parents")
        await self.append(child, state_before={EventId(str(self.pen.tip)): state})
        await self.append(lost, origin="backfill")

    async def redaction(self) -> None:
        for target in (self.room.middle_id, "$" + "x" * 43):
            auth = [self.pen.auth["m.room.create", ""], self.pen.auth["m.room.power_levels", ""]]
            auth.append(self.pen.auth["m.room.member", EVERYWHERE])
            content = f'{{"redacts":"{target}"}}'
            ts = LATE_MS + self.pen.depth
            pdu = self.pen.write(EVERYWHERE, "m.room.redaction", auth, (content, content), ts=ts)
            await self.append(pdu[1])

    async def reply(self) -> None:
        relation = f'"m.relates_to":{{"event_id":"{self.room.root_id}","rel_type":"m.thread"}}'
        await self.append(self.message((), f'{{"body":"x",{relation}}}'))

    async def duplicate(self) -> None:
        message = self.message()
        await self.append(message)
        await self.append(message, outcome="duplicate")

    async def outlier(self) -> None:
        await self.append(self.pen.join(f"@outlier{self.pen.depth}:h1.test"), origin="outlier")

    async def receipt(self) -> None:
        for event_id in (self.room.middle_id, self.room.root_id):
            await self.store.receipts.set(
                RoomId(self.room.room_id), "m.read", UserId(MEMBER), EventId(event_id), {}
            )

    async def send(self) -> None:
        self.store.writer.caches.forget()
        room_id = RoomId(self.room.room_id)
        await self.store.send(
            room_id, MEMBER, "m.room.message", {"body": "x"}, transaction=("A", "1")
        )


WRITES = (
    WriteCases.one_message,
    WriteCases.join,
    WriteCases.batch,
    WriteCases.merge,
    WriteCases.deep_fork,
    WriteCases.power_levels,
    WriteCases.redaction,
    WriteCases.reply,
    WriteCases.duplicate,
    WriteCases.gap,
    WriteCases.outlier,
    WriteCases.receipt,
    WriteCases.send,
)


async def touched(
    states: StatesServer, recorder: PlanRecorder, name: str, events: int
) -> AsyncIterator[tuple[str, Touched]]:
    """Yield what each write touches."""
    room = await states.create(BY_NAME[name], events)
    async with AsyncExitStack() as stack:
        opened = storage.open(
            room.dsn, server_name=SERVER, config=QUIET, signing_key=signing_key(SERVER)
        )
        with recorder.recording() as plans:
            store = await stack.enter_async_context(opened)
        yield "open", Touched.of(plans)
        writer = WriteCases(store, room)
        for write in WRITES:
            with recorder.recording() as plans:
                await write(writer)
            yield write.__name__, Touched.of(plans)
        async with store.database.connection() as conn:
            last = await conn.fetchval("SELECT max(stream_ordering) FROM events")
            with recorder.recording() as plans:
                for rows in (stream_rows.events, stream_rows.backfill):
                    await rows(conn, last - 500, LARGEST_POSITION, None, 100)
        yield "follow", Touched.of(plans)
    await states.drop(room)


@pytest.mark.parametrize("name", few_states_of(BY_NAME))
async def test_a_write_does_not_grow_with_the_room(
    states: StatesServer, recorder: PlanRecorder, name: str
) -> None:
    small = {what: found async for what, found in touched(states, recorder, name, SMALL)}
    growing = {}
    async for what, found in touched(states, recorder, name, LARGE):
        growing.update(found.grown(small[what], what))
    assert growing == {}
