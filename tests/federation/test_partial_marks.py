"""Marks of joins with the members omitted, whose process was killed before the join was stored."""

from typing import NamedTuple

import pytest

import storage
from storage import RoomId, ServerName, Store
from storage.event import Event, parse
from storage.persist.partial_marks import begin
from storage.persist.plan.partial_state import NOT_MARKED
from tests.cli.running import room_storage_beside
from tests.federation.partial import join_partially
from tests.federation.peers import Homeserver
from tests.federation.test_partial_joins import crowded


async def marked_before(one: Homeserver, other: Homeserver) -> tuple[RoomId, Event]:
    """A room, and a join of it whose process was killed once the room was marked."""
    room_id = await crowded(one)
    await other.store.append(  # so that the room is known
        [
            (await one.store.backfill(room_id, await one.store.forward_extremities(room_id), 20))[
                -1
            ].raw
        ],
        room_version="12",
        origin="outlier",
    )
    join = parse(await other.make_join(room_id, one, "b"), "12")
    async with other.store.database.transaction() as conn:
        assert await begin(conn, room_id, join.event_id, ServerName("s1.test"), [])
    return room_id, join


class JoinMarkRow(NamedTuple):
    marks: int
    is_partial: bool


async def is_marked(store: Store, room_id: RoomId) -> tuple[int, bool]:
    async with store.database.connection() as conn:
        row = await conn.fetchrow(
            "SELECT (SELECT count(*) FROM partial_rooms)::int AS marks, is_partial FROM rooms "
            "WHERE room_id = $1",
            room_id,
            row=JoinMarkRow,
        )
    assert row is not None
    return row.marks, row.is_partial


async def test_two_joins_never_share_a_mark(two: list[Homeserver]) -> None:
    """A second join takes the mark of one that is not stored, and that one is refused then.

    A join that is not marked would leave a partial state for good.
    """
    one, other = two
    room_id, first = await marked_before(one, other)
    joined = await join_partially(room_id, other, one)
    assert (joined.outcome, joined.is_partial) == ("joined", True)
    assert [room.join_event_id for room in await other.store.partial_rooms()] == [joined.event_id]
    task = other.receiver._task(room_id, "12")
    state = (await other.store.current_state(room_id)).values()
    result = await task.append_partial(first, state)
    assert (result.outcome, result.reason) == ("invalid", NOT_MARKED)
    assert await other.store.event(first.event_id) is None


@pytest.mark.parametrize("by", ["open", "run", "gc", "another room", "a whole join", "a join"])
async def test_the_mark_of_a_killed_join_goes(
    two: list[Homeserver], another_dsn: str, by: str
) -> None:
    """And an export has the room again. Before, it skips the room, and says so."""
    one, other = two
    room_id, _ = await marked_before(one, other)
    assert await is_marked(other.store, room_id) == (1, True)
    match by:
        case "open":
            done = await room_storage_beside("export", "-", "--dsn", another_dsn)
            assert (done.returncode, done.stdout) == (0, "")
            assert f"{room_id} is skipped" in done.stderr
            async with storage.open(another_dsn, server_name="s2.test", instance_name="second"):
                pass
        case "run":
            assert await other.receiver.complete_partial_rooms() == []
        case "gc":
            done = await room_storage_beside("gc", "--dsn", another_dsn)
            assert "1 mark of joins" in done.stdout
        case "another room":
            elsewhere = await crowded(one)
            assert (await other.join(elsewhere, one)).outcome == "joined"
        case _:
            entering = join_partially(room_id, other, one)
            if by == "a whole join":
                entering.close()
                entering = other.join(room_id, one)
            assert (await entering).outcome == "joined"
            assert await other.receiver.complete(room_id)
    assert await is_marked(other.store, room_id) == (0, False)
    done = await room_storage_beside("export", "-", "--room", room_id, "--dsn", another_dsn)
    assert done.returncode == 0, done.stderr
    assert done.stdout
