"""Room lists from what processes remember, and by reading everything: always the same.

Two stores write to one database, and get notifications of each other now and then, or of one
stream only. Snapshots stay open while more is written, so that some are older than the cached list.
`STORAGE_EXAMPLES` says how many sequences.
"""

import asyncio
import os
import random
from contextlib import AsyncExitStack, suppress
from typing import Any, Self

import pytest

import storage
from storage import SlidingFilter, Store
from storage.database.connection import Connection
from storage.errors import InputError, UnknownRoom
from storage.ids import RoomId, UserId
from storage.maintenance.purge import purge_room
from storage.persistent_map import Map
from storage.queries.sliding.room_lists import RoomList
from storage.queries.sync.changed_rooms import ChangeSnapshot
from storage.streams.position_poller import follow_once
from storage.testing import BuiltEvent, RoomBuilder
from tests.oracle.test_memory import _hear_of
from tests.sliding.dumb_list import DumbList
from tests.small_limits import cached_entries

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "2"))
STEPS = 60
ADMIN, READER, OTHER = "@user1:s1.test", "@user4:s1.test", "@user7:s1.test"
USERS = (ADMIN, READER, OTHER)
SMALL = {"room_lists": 6, "rooms": 3}


class Worlds:
    """Rooms on their branches, written by two stores."""

    def __init__(self, dsn: str, rng: random.Random) -> None:
        self.dsn, self.rng = dsn, rng
        self.rooms: list[RoomBuilder] = []
        self.stores: list[Store] = []
        self.snapshots: list[tuple[AsyncExitStack, Store, Connection, str, ChangeSnapshot]] = []
        self.made = 0
        self.stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        config = storage.Config(follow_ms=3_600_000)
        for name in ("one", "two"):
            self.stores.append(
                await self.stack.enter_async_context(
                    storage.open(self.dsn, server_name="s1.test", instance_name=name, config=config)
                )
            )
        return self

    async def __aexit__(self, *_: object) -> None:
        for snapshot in self.snapshots:
            await snapshot[0].aclose()
        await self.stack.aclose()

    async def append(self, *events: BuiltEvent) -> None:
        store = self.rng.choice(self.stores)
        version = events[0].room_version
        await store.append([event.pdu for event in events], room_version=version)

    async def begin(self) -> None:
        self.made += 1
        content = {"type": "m.space"} if self.rng.random() < 0.4 else None
        room = RoomBuilder(self.rng.choice(("6", "11")), seed=self.made, sign=False)
        rule = self.rng.choice(("public", "knock")) if room.version == "11" else "public"
        room.start(ADMIN, content=content, join_rule=rule, name=f"Room {self.made}")
        self.rooms.append(room)
        await self.append(*room.events)

    async def step(self) -> None:
        """Write an event, or account data, or do something rarer."""
        if len(self.rooms) < 3 or self.rng.random() < 0.06:
            await self.begin()
        kind = self.rng.random()
        if kind < 0.7:
            await self.write(self.rng.choice(self.rooms))
        elif kind < 0.8:
            await self.fork()
        elif kind < 0.9:
            await self.account_data()
        else:
            await self.rare()

    async def write(self, room: RoomBuilder) -> None:
        user, number = self.rng.choice((READER, READER, OTHER)), len(room.events)
        options: list[Any] = [
            lambda: room.message(ADMIN),
            lambda: room.message(ADMIN),
            lambda: room.join(user),
            lambda: room.join(user),
            lambda: room.leave(user),
            lambda: room.invite(ADMIN, user),
            lambda: room.kick(ADMIN, user),
            lambda: room.ban(ADMIN, user),
            lambda: room.unban(ADMIN, user),
            lambda: room.knock(user),
            lambda: room.name(ADMIN, f"Name {number}"),
            lambda: room.state_event(ADMIN, "m.room.encryption", {"algorithm": "m"}),
            lambda: room.state_event(
                ADMIN,
                "m.space.child",
                {"via": ["s1.test"]} if self.rng.random() < 0.7 else {},
                self.rng.choice(self.rooms).room_id,
            ),
            lambda: room.redact(ADMIN, self.rng.choice(room.events)),
        ]
        with suppress(ValueError):
            await self.append(self.rng.choice(options)())

    async def fork(self) -> None:
        """Let two branches disagree about a member and a name, and merge them."""
        room, user = self.rng.choice(self.rooms), self.rng.choice((READER, OTHER))
        one, other = room.fork(2)
        with suppress(ValueError):
            first = [self.rng.choice((one.join, one.leave))(user), one.name(ADMIN, "left")]
            await self.append(*first)
            second = self.rng.choice((other.ban, other.kick, other.invite))(ADMIN, user)
            await self.append(second, other.name(ADMIN, "right"))
            room.merge(one, other)
            await self.append(room.message(ADMIN))

    async def account_data(self) -> None:
        store, user = self.rng.choice(self.stores), UserId(self.rng.choice((READER, OTHER)))
        room = RoomId(self.rng.choice(self.rooms).room_id)
        if self.rng.random() < 0.5:
            chosen = [one.room_id for one in self.rooms if self.rng.random() < 0.5]
            await store.account_data.set(user, "m.direct", {ADMIN: chosen})
        else:
            tags: dict[str, Any] = {one: {} for one in ("a", "b") if self.rng.random() < 0.5}
            await store.account_data.set(user, "m.tag", {"tags": tags}, room_id=room)

    async def rare(self) -> None:
        store, room = self.rng.choice(self.stores), self.rng.choice(self.rooms)
        if self.rng.random() < 0.7:
            with suppress(InputError, UnknownRoom):
                await store.forget(self.rng.choice((READER, OTHER)), room.room_id)
        elif self.rng.random() < 0.4 and not self.snapshots:
            self.rooms.remove(room)
            await purge_room(store.database, room.room_id, server_name="s1.test", force=True)

    async def hear(self) -> None:
        store = self.rng.choice(self.stores)
        if (chance := self.rng.random()) < 0.2:
            await follow_once(store.database, store.streams)
        elif chance < 0.5:
            stream = self.rng.choice(("events", "caches", "account_data"))
            await _hear_of(store, stream)

    # Comparing

    async def look(self) -> None:
        """Compare in a new snapshot, which may stay open, or in an old one."""
        if self.snapshots and self.rng.random() < 0.5:
            stack, store, conn, user, news = self.snapshots.pop(
                self.rng.randrange(len(self.snapshots))
            )
            async with stack:
                await self.compare(store, conn, user, news, is_fresh=False)
            return
        stack, store = AsyncExitStack(), self.rng.choice(self.stores)
        user = self.rng.choice((READER, OTHER))
        conn = await stack.enter_async_context(
            store.database.transaction(isolation="repeatable_read", readonly=True)
        )
        news, _ = await store.sliding.changes.snapshot_of_connection(conn, (0, 0), (user, "", ""))
        if self.rng.random() < 0.3 and len(self.snapshots) < 2:
            self.snapshots.append((stack, store, conn, user, news))
            return
        async with stack:
            await self.compare(store, conn, user, news, is_fresh=True)

    async def compare(
        self, store: Store, conn: Connection, user: str, news: ChangeSnapshot, *, is_fresh: bool
    ) -> None:
        found = await store.sliding.lists.of(conn, UserId(user), news)
        dumb = DumbList(conn, user)
        for wanted in (SlidingFilter(), self.filters(), self.filters()):
            sent = self.sent()
            expected = await dumb.window(wanted, sent)
            await self.check(found, conn, wanted, sent, expected)
            if is_fresh and news.unseen == frozenset() and news.is_resolved:
                self.check_cached(store, user, news, wanted, sent, expected)

    def check_cached(
        self,
        store: Store,
        user: str,
        news: ChangeSnapshot,
        wanted: SlidingFilter,
        sent: Any,
        expected: list[tuple[str, int]],
    ) -> None:
        """Compare the list of a store that has followed everything, without a statement."""
        assumed = store.sliding.expected_snapshot(UserId(user))
        assert assumed is not None
        if assumed.positions["account_data"] != news.positions["account_data"]:
            return
        cached = store.sliding.lists.cached(UserId(user), assumed)
        window = None if cached is None else cached.cached_window(wanted, None, sent)
        if window is not None:
            rooms = [(room.room_id, room.activity) for room in window[1]]
            assert rooms == expected, (wanted, sent)

    async def check(
        self,
        found: RoomList,
        conn: Connection,
        wanted: SlidingFilter,
        sent: Any,
        expected: list[tuple[str, int]],
    ) -> None:
        count, rooms = await found.window(conn, wanted, None, sent)
        assert [(room.room_id, room.activity) for room in rooms] == expected, (wanted, rooms)
        assert count == len(expected)
        first, second = sorted(self.rng.randrange(8) for _ in range(2))
        ranges = [(first, second), (1, 1)]
        count, some = await found.window(conn, wanted, ranges, sent)
        indexes = sorted({1, *range(first, second + 1)})
        assert count == len(expected)
        assert some == [rooms[at] for at in indexes if at < len(rooms)]
        for room in rooms:
            assert found.get(room.room_id) == found.by_nid(room.room_nid) == room

    def filters(self) -> SlidingFilter:
        rng = self.rng
        options: dict[str, Any] = {
            "is_dm": rng.random() < 0.5,
            "spaces": [room.room_id for room in self.rooms if rng.random() < 0.5],
            "is_encrypted": rng.random() < 0.5,
            "is_invited": rng.random() < 0.5,
            "room_types": rng.choice(([None], ["m.space"], [None, "m.space"])),
            "not_room_types": rng.choice(([None], ["m.space"])),
            "room_name_like": rng.choice(("NAME", "room", "left", "1")),
            "tags": ["a"],
            "not_tags": ["b"],
        }
        names = rng.sample(sorted(options), rng.choice((0, 1, 1, 1, 2)))
        return SlidingFilter(**{name: options[name] for name in names})

    def sent(self) -> Any:
        return Map({nid: None for nid in range(1, 400) if self.rng.random() < 0.5})


@pytest.mark.parametrize("limits", [{}, SMALL], ids=["large", "small"])
@pytest.mark.parametrize("seed", range(EXAMPLES))
async def test_remembered_lists_are_those_of_a_full_read(
    dsn: str, seed: int, limits: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_entries(monkeypatch, **limits)
    async with Worlds(dsn, random.Random(seed)) as worlds, asyncio.timeout(60):
        for _ in range(STEPS):
            await worlds.step()
            await worlds.hear()
            await worlds.look()
