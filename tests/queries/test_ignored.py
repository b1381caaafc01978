"""IgnoringReads leave out events of ignored users, except state."""

import itertools
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from storage import (
    InputError,
    SlidingList,
    SlidingSyncRequest,
    Store,
    UserId,
    responses,
)
from storage.testing import RoomBuilder
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, append, deliver, new_room


async def test_messages_of_ignored_users_are_left_out_and_their_state_is_not(
    store: Store, statements: StatementLog
) -> None:
    room = new_room(members=[LOCAL, OTHER])
    heard = room.message(ADMIN)
    noise = [room.message(OTHER) for _ in range(5)]
    profile = room.join(OTHER, displayname="loud")
    last = room.message(ADMIN)
    await deliver(store, room)
    ignored = [UserId(OTHER), UserId("@nobody:nowhere.test")]
    statements.take()
    page = await store.messages(room.room_id, LOCAL, limit=3, ignored=ignored)
    assert [event.event_id for event in page.chunk] == [
        last.event_id,
        profile.event_id,
        heard.event_id,
    ]
    assert page.end is not None
    assert len(statements.take()) <= 2
    forwards = await store.messages(room.room_id, LOCAL, direction="f", limit=100, ignored=ignored)
    assert not {event.event_id for event in noise} & {event.event_id for event in forwards.chunk}
    around = await store.context(heard.event_id, LOCAL, limit=4, ignored=ignored)
    assert [event.event_id for event in around.events_after] == [profile.event_id, last.event_id]
    statements.take()
    timeline = (
        (await store.sync(LOCAL, timeline_limit=3, ignored=ignored)).join[room.room_id].timeline
    )
    assert len(statements.take()) <= 4
    assert [event.event_id for event in timeline.events] == [
        heard.event_id,
        profile.event_id,
        last.event_id,
    ]
    assert timeline.limited


LIST = "m.ignored_user_list"
REQUEST = SlidingSyncRequest(
    lists={"all": SlidingList(ranges=[(0, 9)], timeline_limit=9)}, unread=True
)


def the_same(answers: Sequence[bool]) -> bool:
    """Return what all parts of an answer say."""
    assert len(set(answers)) == 1, answers
    return answers[0]


class IgnoringReads:
    """All reads that take ``ignored``: each returns whether it has something of the other user."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.room = new_room(members=[LOCAL, OTHER])
        self.said = self.room.message(ADMIN)
        self.reply = self.room.threaded(OTHER, self.said, "noise")
        self.noise = self.room.message(OTHER)
        self.inviting = new_room(seed=1, members=[OTHER], join_rule="public")
        self.inviting.invite(OTHER, LOCAL)
        self.devices = itertools.count()

    @property
    def all(self) -> dict[str, Callable[..., Awaitable[bool]]]:
        names = (name for name in vars(IgnoringReads) if name.startswith("of_"))
        return {name: getattr(self, name) for name in names}

    async def of_sync(self, **how: Any) -> bool:
        found = await self.store.sync(LOCAL, device_id="A", timeline_limit=3, **how)
        one = found.join[self.room.room_id]
        made = await responses.sync(self.store, LOCAL, found)
        shown = made["rooms"]["join"][self.room.room_id]["timeline"]["events"]
        return the_same(
            [
                self.noise.event_id in {event.event_id for event in one.timeline.events},
                bool(one.unread and one.unread.threads),
                self.inviting.room_id in found.invite,
                any("m.relations" in event["unsigned"] for event in shown),
            ]
        )

    async def of_sliding_sync(self, **how: Any) -> bool:
        device = f"D{next(self.devices)}"
        found = await self.store.sliding_sync(LOCAL, REQUEST, device_id=device, **how)
        one = found.rooms[self.room.room_id]
        made = await responses.sliding_sync(self.store, LOCAL, REQUEST, found)
        shown = made["rooms"][self.room.room_id]["timeline"]
        return the_same(
            [
                self.noise.event_id in {event.event_id for event in one.timeline},
                bool(one.unread and one.unread.threads),
                self.inviting.room_id in found.rooms,
                any("m.relations" in event["unsigned"] for event in shown),
            ]
        )

    async def of_messages(self, **how: Any) -> bool:
        found = await self.store.messages(self.room.room_id, LOCAL, aggregations=True, **how)
        return the_same(
            [
                self.noise.event_id in {one.event_id for one in found.chunk},
                any(one.relations is not None for one in found.chunk),
            ]
        )

    async def of_context(self, **how: Any) -> bool:
        found = await self.store.context(self.said.event_id, LOCAL, aggregations=True, **how)
        return the_same(
            [
                self.noise.event_id in {one.event_id for one in found.events_after},
                found.event.relations is not None,
            ]
        )

    async def of_relations(self, **how: Any) -> bool:
        said = self.said.event_id
        some = await self.store.relations(said, LOCAL, **how)
        more = await self.store.relations(said, LOCAL, recurse=True, **how)
        return the_same([bool(some.chunk), bool(more.chunk)])

    async def of_aggregations(self, **how: Any) -> bool:
        return bool(await self.store.aggregations(LOCAL, [self.said.event_id], **how))

    async def of_threads(self, **how: Any) -> bool:
        return bool((await self.store.threads(self.room.room_id, LOCAL, **how)).chunk)

    async def of_client_events(self, **how: Any) -> bool:
        found = await self.store.events([self.said.event_id])
        [one] = await self.store.client_events(LOCAL, found.values(), **how)
        return "m.relations" in one["unsigned"]

    async def of_unread(self, **how: Any) -> bool:
        found = await self.store.unread(LOCAL, **how)
        return bool(found[self.room.room_id].threads)


async def test_each_read_leaves_out_the_users_that_the_account_data_list(store: Store) -> None:
    """Client-server API, "Ignoring Users". A list that is given counts in its place."""
    reads = IgnoringReads(store)
    calls = reads.all
    assert len(calls) == 9
    for room in (reads.room, reads.inviting):
        await deliver(store, room)
    user, by_list = UserId(LOCAL), [UserId(OTHER)]
    for name, ask in calls.items():
        assert await ask(), name
        assert not await ask(ignored=by_list), name
    odd = {"\0": "\0", "\\": "\\u0000", "number": 1e300, OTHER: {}}
    await store.account_data.set(user, LIST, {"ignored_users": odd})
    for name, ask in calls.items():
        assert not await ask(), name
        assert not await ask(ignored="account_data"), name
        assert await ask(ignored=()), name
        assert await ask(ignored=[ADMIN + "x"]), name
        with pytest.raises(InputError):
            await ask(ignored="everybody")
    others: list[dict[str, Any]] = [{"ignored_users": [OTHER]}, {"ignored_users": OTHER}, {}]
    for content in others:
        await store.account_data.set(user, LIST, content)
        for name, ask in calls.items():
            assert await ask(), (name, content)


async def test_an_invite_by_an_ignored_user_is_left_out(store: Store) -> None:
    """An initial sync leaves it out too.

    The room is there once the user has joined all the same.
    """
    room = new_room(join_rule="invite")
    await deliver(store, room)
    since = (await store.sync(LOCAL)).next_batch
    room.invite(ADMIN, LOCAL)
    await deliver(store, room)
    for token in (None, since):
        assert (await store.sync(LOCAL, since=token, ignored=[UserId(ADMIN)])).is_empty
        assert list((await store.sync(LOCAL, since=token, ignored=[UserId(OTHER)])).invite) == [
            room.room_id
        ]
    room.join(LOCAL)
    await deliver(store, room)
    assert list((await store.sync(LOCAL, since=since, ignored=[UserId(ADMIN)])).join) == [
        room.room_id
    ]


async def test_an_invite_over_federation_by_an_ignored_user_is_left_out(store: Store) -> None:
    room = RoomBuilder("11", sign=False)
    room.start(REMOTE, join_rule="invite")
    invite = room.invite(REMOTE, LOCAL)
    since = (await store.sync(LOCAL)).next_batch
    await append(store, *room.events[:-1], invite, origin="outlier")
    for token in (None, since):
        assert (await store.sync(LOCAL, since=token, ignored=[UserId(REMOTE)])).is_empty
        assert list((await store.sync(LOCAL, since=token)).invite) == [room.room_id]


async def test_a_knock_of_ones_own_is_told_whoever_is_ignored(store: Store) -> None:
    room = new_room(join_rule="knock")
    room.knock(LOCAL)
    await deliver(store, room)
    assert list((await store.sync(LOCAL, ignored=[UserId(ADMIN), UserId(LOCAL)])).knock) == [
        room.room_id
    ]
