"""Maintenance of a room touches its rows, whatever statistics say of all rooms.

A small room is verified, collected and purged beside a big one, which may have 1,000 or 16,000
events: the rows are the same. In a room of 400 events each statement touches a few rows for each.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Final

import pytest

import storage
from benchmarks.crowd import EVERYWHERE, SERVER, room_id
from benchmarks.statistics_states import BY_NAME, BigRoom, StatesServer
from storage import Store
from storage.ids import RoomId
from storage.maintenance.censor import censor
from storage.maintenance.purge import purge_history, purge_retention, purge_room
from storage.maintenance.purge import run as purge_run
from storage.maintenance.state_group_gc import collect
from storage.maintenance.verify.run import verify_room
from storage.testing import signing_key
from tests.persist.writing import QUIET
from tests.plans.chosen import few_states_of
from tests.plans.recording import PlanRecorder, Touched
from tests.plans.test_writes import LARGE, SMALL

pytestmark = [
    pytest.mark.xdist_group("plans-maintenance"),
    pytest.mark.timeout(600),
]

EACH: Final = 12
"""Rows that one statement may touch for each event of the room that it goes through."""
BESIDE: Final = 300
"""And for its members and state."""
ROOM: Final = 400
"""Messages of the room: few against those of all rooms, which no statement may read."""

BESIDE_OTHERS: Final = tuple(name for name, state in BY_NAME.items() if state.others)
CONFIG: Final = replace(QUIET, retention_lifetime_ms_min=1)

Task = Callable[[Store, str], Awaitable[object]]


async def verified(store: Store, name: str) -> None:
    async with store.database.transaction(isolation="repeatable_read", readonly=True) as conn:
        found = [finding async for finding in verify_room(conn, name, server_name=SERVER)]
    assert found == []


async def collected(store: Store, name: str) -> None:
    await collect(store.database, name, indexes_compared=True)


async def purged(store: Store, name: str) -> None:
    page = await store.messages(RoomId(name), EVERYWHERE, limit=20)
    purge = await purge_history(
        store.database,
        name,
        server_name=SERVER,
        before_event_id=page.chunk[-1].event_id,
        local=True,
    )
    assert purge.events > 0


async def purged_whole(store: Store, name: str) -> None:
    await purge_room(store.database, name, server_name=SERVER, force=True)


async def censored(store: Store, name: str) -> None:
    page = await store.messages(RoomId(name), EVERYWHERE, limit=5)
    await store.send(
        RoomId(name), EVERYWHERE, "m.room.redaction", {}, redacts=page.chunk[0].event_id
    )
    done = await censor(store.database, older_than_ms=0)
    assert done.censored == 1


async def retained(store: Store, name: str) -> None:
    content = {"max_lifetime": 1}
    await store.send(RoomId(name), EVERYWHERE, "m.room.retention", content, state_key="")
    done = [one async for one in purge_retention(store.database, server_name=SERVER)]
    assert [one.room_id for one in done] == [name]


TASKS: Final[tuple[tuple[int, Task], ...]] = (
    (5, verified),
    (5, collected),
    (5, purged),
    (6, censored),
    (7, retained),
    (8, purged_whole),
)
"""Each with the number of its small room."""
PROBING: Final = ("censored",)
"""It looks at positions far before: there the dead rows of a purge stay until a vacuum."""


@pytest.fixture(autouse=True)
def indexes_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison of the indexes reads all tables whole, on purpose."""

    async def proven(*_: object, **__: object) -> None:
        """Do nothing."""

    monkeypatch.setattr(purge_run, "refuse_corrupt_indexes", proven)
    monkeypatch.setattr("storage.maintenance.censor.refuse_corrupt_indexes", proven)


async def touched(
    recorder: PlanRecorder, room: BigRoom, tasks: tuple[tuple[str, Task], ...]
) -> dict[str, Touched]:
    found = {}
    async with storage.open(
        room.dsn, server_name=SERVER, config=CONFIG, signing_key=signing_key(SERVER)
    ) as store:
        for name, task in tasks:
            with recorder.recording() as plans:
                await task(store, name)
            found[task.__name__] = Touched.of(plans)
    return found


@pytest.mark.parametrize("name", few_states_of(BESIDE_OTHERS))
async def test_a_small_room_beside_a_big_one(
    states: StatesServer, recorder: PlanRecorder, name: str
) -> None:
    found = []
    for events in (SMALL, LARGE):
        room = await states.create(BY_NAME[name], events)
        tasks = tuple((room_id(number), task) for number, task in TASKS)
        found.append(await touched(recorder, room, tasks))
        await states.drop(room)
    growing = {}
    for what, after in found[1].items():
        is_probed = what in PROBING and BY_NAME[name].purged
        shown = after.rows_only() if is_probed else after
        growing.update(shown.grown(found[0][what], what))
    assert growing == {}


@pytest.mark.parametrize("name", few_states_of(("never-analysed", "analysed-small", "alone")))
async def test_each_statement_touches_a_few_rows_for_each_event(
    states: StatesServer, recorder: PlanRecorder, name: str
) -> None:
    room = await states.create(BY_NAME[name], ROOM)
    tasks = tuple((room.room_id, task) for task in (verified, collected, purged, retained))
    many = {}
    for what, touch in (await touched(recorder, room, tasks)).items():
        for sql, (rows, _) in touch.items():
            if rows > EACH * ROOM + BESIDE:
                many[f"{what}: {' '.join(sql.split())}"] = rows
    await states.drop(room)
    assert many == {}
