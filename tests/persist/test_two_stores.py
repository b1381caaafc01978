"""What a writer remembers may be old, as others write too: where it writes it is refused, and where it does not, it must not matter."""

import storage
from storage.testing import RoomBuilder

ALONE = storage.Config(follow_ms=3_600_000)


async def test_an_outlier_that_another_store_has_made_live_is_a_parent(dsn: str) -> None:
    """To say that parents are missing, nothing is written, so nobody would refuse it."""
    room = RoomBuilder("11", seed=1)
    admin = room.user(1)
    room.start(admin)
    beginning = list(room.pdus)
    parent, child = room.message(admin, "first"), room.message(admin, "second")
    async with (
        storage.open(dsn, server_name="s1.test", config=ALONE) as one,
        storage.open(dsn, server_name="s1.test", instance_name="two", config=ALONE) as two,
    ):
        await one.append(beginning)
        [held] = await one.append([parent.pdu], origin="outlier")
        [live] = await two.append([parent.pdu])
        [last] = await one.append([child.pdu])
        assert [held.outcome, live.outcome, last.outcome] == ["stored"] * 3
        assert await two.forward_extremities(room.room_id) == {child.event_id}


async def test_an_outlier_that_another_store_has_made_live_is_a_duplicate(dsn: str) -> None:
    """Also where its parents are missing, and only the other store was told the state before it."""
    room = RoomBuilder("11", seed=1)
    admin = room.user(1)
    room.start(admin)
    beginning = list(room.pdus)
    state = list(room.state.values())
    room.message(admin, "lost")
    held = room.message(admin, "held")
    async with (
        storage.open(dsn, server_name="s1.test", config=ALONE) as one,
        storage.open(dsn, server_name="s1.test", instance_name="two", config=ALONE) as two,
    ):
        await one.append(beginning)
        [first] = await one.append([held.pdu], origin="outlier")
        [live] = await two.append([held.pdu], state_before={held.event_id: state})
        [again] = await one.append([held.pdu])
        assert [first.outcome, live.outcome, again.outcome] == ["stored", "stored", "duplicate"]
