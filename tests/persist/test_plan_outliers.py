"""Outliers in the plan: memberships over federation, and events that came out of band."""

from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.database.names import JOIN, MEMBERSHIPS
from storage.event import parse
from storage.persist.model.caches import NidBlocks
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import IncomingEvent
from storage.testing import RoomBuilder
from tests.persist.planning import SERVER, SQL_MEMBERSHIPS, begun, fetch, planned, take


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as opened:
        yield opened


async def test_an_outlier_invite_to_a_room_without_this_server_is_a_membership(
    store: Store,
) -> None:
    room = RoomBuilder("11", seed=1, sign=False)
    admin, guest, stranger = room.user(1, "s2.test"), room.user(2, SERVER), room.user(3, "s2.test")
    room.start(admin)
    invited = room.invite(admin, guest)
    room.invite(admin, stranger)
    await take(store, *room.events, origin="outlier")
    assert await fetch(store, SQL_MEMBERSHIPS) == [(guest, MEMBERSHIPS["invite"], invited.event_id)]
    joined = room.join(guest)
    await take(store, joined, origin="outlier")
    assert await fetch(store, SQL_MEMBERSHIPS) == [(guest, MEMBERSHIPS["invite"], invited.event_id)]


async def test_an_invite_as_an_outlier_says_nothing_where_this_server_is_in_the_room(
    store: Store,
) -> None:
    room, admin, _ = begun()
    guest = room.user(3, SERVER)
    await take(store, *room.events)
    await take(store, room.fork(1)[0].invite(admin, guest), origin="outlier")
    assert await fetch(store, SQL_MEMBERSHIPS) == [(admin, JOIN, room.events[1].event_id)]


async def test_an_event_that_others_waited_for_keeps_its_number(store: Store) -> None:
    room, admin, _ = begun()
    before, state = list(room.events), list(room.state.values())
    lost, child = room.message(admin), room.message(admin)
    await take(store, *before)
    await take(store, child, state_before={child.event_id: state})
    [(waited,)] = await fetch(store, "SELECT event_nid FROM missing_events")
    await take(store, lost, origin="backfill")
    rows_ = await fetch(store, "SELECT event_id, event_nid FROM events")
    assert dict(rows_)[lost.event_id] == waited


async def test_outliers_that_are_no_accepted_memberships_give_none(store: Store) -> None:
    """An invite by one who may not, other state under a local user's name, and a message."""
    room = RoomBuilder("11", seed=1, sign=False, checked=False)
    admin, stranger, guest = room.user(1, "s2.test"), room.user(2, "s2.test"), room.user(3, SERVER)
    room.start(admin)
    room.send(admin, "org.example.note", {}, state_key=f"note:{SERVER}")
    room.message(admin)
    refused = room.invite(stranger, guest)
    results = await take(store, *room.events, origin="outlier")
    assert [one.event_id for one in results if one.outcome != "stored"] == [refused.event_id]
    assert await fetch(store, SQL_MEMBERSHIPS) == []


async def test_an_invite_as_an_outlier_counts_again_when_this_server_has_left(store: Store) -> None:
    room = RoomBuilder("11", seed=1, sign=False)
    admin, guest, friend = room.user(1, "s2.test"), room.user(2, SERVER), room.user(3, SERVER)
    room.start(admin)
    room.join(guest)
    left = room.leave(guest)
    await take(store, *room.events)
    invited = room.invite(admin, friend)
    await take(store, invited, origin="outlier")
    assert await fetch(store, SQL_MEMBERSHIPS) == [
        (guest, MEMBERSHIPS["leave"], left.event_id),
        (friend, MEMBERSHIPS["invite"], invited.event_id),
    ]


class Replayed(ChangeSet):
    is_live = False


@pytest.mark.parametrize("kind,outcome", [(ChangeSet, "invalid"), (Replayed, "stored")])
async def test_what_came_out_of_band_once_is_not_checked_when_the_tables_are_read(
    store: Store, kind: type[ChangeSet], outcome: str
) -> None:
    """This server is in the room by now, so the invite would be refused."""
    room, admin, _ = begun()
    await take(store, *room.events)
    invite = IncomingEvent(parse(room.invite(admin, room.user(3, SERVER)).pdu, "11"), "out_of_band")
    assert (
        await planned(store, kind(store.writer.caches, NidBlocks(), SERVER), invite)
    ).outcome == outcome
