"""Rooms too large to be appended for every run, written as nids.

Their state groups and chain cover are made by the engine's own pure functions
(storage.state.groups, storage.graph.chains) and loaded by COPY, with events that have no content.
`BigRoomHistory` describes a room by its users. `BigRoomTables` writes it as nids, `appended` as
signed events through ``store.append``. Both write the same rows of `state_groups`, which
benchmarks/state.py checks.
"""

import random
from base64 import urlsafe_b64encode
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from storage import Store
from storage.database.connection import Connection
from storage.graph.chains import (
    Chain,
    ChainColumns,
    ChainEntry,
    ChainParent,
    ChainPosition,
    all_columns,
    enter,
    extended,
)
from storage.persistent_map import Map
from storage.state.groups import (
    GROUP_COLUMNS,
    REMOVED,
    Group,
    GroupRow,
    changed_keys,
    derive,
    root_group,
    row_of,
)
from storage.testing import RoomBuilder

FIRST_USER_KEY: Final = 1000
FIRST_EVENT: Final = 1000
ROOM_NID: Final = 1
TYPE_MEMBER: Final = 2
# create, the admin's join, power levels, join rules, history visibility
BASE_KEYS: Final = (
    1,
    FIRST_USER_KEY,
    3,
    4,
    5,
)
FILLER: Final = b'{"content":{},"filler":"' + b"x" * 400 + b'"}'
SIDES: Final = 3  # most changes on each side of a fork

EVENT_COLUMNS: Final = """
    event_nid stream_ordering topological_ordering depth origin_server_ts received_ts
    state_group_before state_group_after audience redacted_by room_nid sender_nid type_nid
    state_key_nid writer_nid encoding membership outlier backfilled soft_failed redacted_form
    event_id rejected prev_events auth_events json
"""


class BigRoomChange(NamedTuple):
    """The next changes of users: on the main line, and on a branch that is merged afterwards."""

    main: Sequence[int]
    branch: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class BigRoomHistory:
    """Users join one after the other, then other changes follow; a share of them are forks."""

    members: int
    changes: int
    forks: float = 0.02
    longest: int = SIDES
    """The maximum number of changes on each side of a fork."""
    newcomers: bool = False
    """Changes are joins and leaves of new users, as in a wave of spam."""
    seed: int = 1

    def smaller(self) -> "BigRoomHistory":
        """Return a tenth of it, for a quick run."""
        members = self.members // 10
        return replace(
            self,
            members=members,
            changes=self.changes // 10,
            longest=max(1, min(self.longest, members // 4)),
        )

    def __iter__(self) -> Iterator[BigRoomChange]:
        rng = random.Random(self.seed)
        for user in range(1, self.members):
            yield BigRoomChange([user])
        left, new = self.changes, self.members
        while left > 0:
            if self.newcomers:
                yield BigRoomChange([new, new])
                left, new = left - 2, new + 1
            elif rng.random() < self.forks:
                sides = [rng.randint(1, self.longest) for _ in range(2)]
                users = rng.sample(range(1, self.members), sum(sides))
                yield BigRoomChange(users[: sides[0]], users[sides[0] :])
                left -= sum(sides)
            else:
                yield BigRoomChange([rng.randrange(1, self.members)])
                left -= 1


class WrittenGroup(NamedTuple):
    """A written group: its row, and how many rows its path has, entries its row, entries a read."""

    row: GroupRow
    parts: int
    delta: int
    folded: int


class StateEventNumbers(NamedTuple):
    """A state event as nids."""

    nid: int
    key: int
    before: int
    after: int
    prev: tuple[int, ...]
    auth: tuple[int, ...]
    event_id: str


@dataclass(slots=True)
class BigRoomTables:
    """A room as nids, as `storage.persist` would write it."""

    groups: list[WrittenGroup] = field(default_factory=list)
    events: list[StateEventNumbers] = field(default_factory=list)
    places: dict[int, ChainEntry] = field(default_factory=dict)
    recent: deque[Group] = field(default_factory=lambda: deque(maxlen=64))
    _chains: dict[int, Chain] = field(default_factory=dict)
    _by_key: dict[int, int] = field(default_factory=dict)
    _rng: random.Random = field(default_factory=lambda: random.Random(1))

    @classmethod
    def of(
        cls, history: BigRoomHistory, *, chains: bool = False, keep_events: bool = True
    ) -> "BigRoomTables":
        """Return the tables of the whole history."""
        sheet = cls()
        main = sheet._write(root_group(1, ROOM_NID, Map(), 0))
        tip: tuple[int, ...] = ()
        for key in BASE_KEYS:
            main, tip = sheet._send(main, key, tip, chains=chains, keep=keep_events)
        for happening in history:
            fork, fork_tip = main, tip
            for user in happening.main:
                main, tip = sheet._send(
                    main, FIRST_USER_KEY + user, tip, chains=chains, keep=keep_events
                )
            side, side_tip, current = fork, fork_tip, main
            for user in happening.branch:
                side, side_tip = sheet._send(
                    side, FIRST_USER_KEY + user, side_tip, chains=chains, keep=keep_events
                )
                current = sheet._merged(main, side, current)
            main, tip = current, (*tip, *side_tip) if happening.branch else tip
        return sheet

    def _send(
        self, before: Group, key: int, prev: tuple[int, ...], *, chains: bool, keep: bool
    ) -> tuple[Group, tuple[int, ...]]:
        nid = FIRST_EVENT + len(self.events)
        after = self._write(derive(before, {key: nid}, self._next_group(), 0))
        wanted = (
            {}
            if key == BASE_KEYS[0]
            else dict.fromkeys(
                (1, 3, 4, FIRST_USER_KEY, key) if key < FIRST_USER_KEY else (1, 3, 4, key)
            )
        )
        auth = tuple(before.entries[one] for one in wanted if one in before.entries and one != 5)
        event_id = "$" + urlsafe_b64encode(self._rng.randbytes(32)).decode()[:43] if keep else ""
        self.events.append(
            StateEventNumbers(nid, key, before.state_group, after.state_group, prev, auth, event_id)
        )
        if chains:
            self._cover(nid, key, auth)
        return after, (nid,)

    def _merged(self, one: Group, other: Group, current: Group) -> Group:
        """Return the newer value of each differing key, as the smallest change (`state_merge`)."""
        differ = changed_keys(one, other)
        newest = {
            key: max(one.entries.get(key, REMOVED), other.entries.get(key, REMOVED))
            for key in differ
        }
        changes = []
        for base in (one, other, current):
            keys = changed_keys(base, one) | differ
            target = {key: newest.get(key, one.entries.get(key, REMOVED)) for key in keys}
            changes.append(
                (
                    base,
                    {
                        key: nid
                        for key, nid in target.items()
                        if base.entries.get(key, REMOVED) != nid
                    },
                )
            )
        base, change = min(changes, key=lambda pair: len(pair[1]))
        return self._write(derive(base, change, self._next_group(), 0)) if change else base

    def _next_group(self) -> int:
        return len(self.groups) + 1

    def _write(self, group: Group) -> Group:
        row = row_of(group, lambda key: key >= FIRST_USER_KEY)
        self.groups.append(
            WrittenGroup(
                row,
                len(group.steps),
                len(group.steps[-1].delta),
                sum(len(step.delta) for step in group.steps),
            )
        )
        self.recent.append(group)
        return group

    def _cover(self, nid: int, key: int, auth: tuple[int, ...]) -> None:
        parents = [
            ChainParent(one, self.places[one].position, self.events[one - FIRST_EVENT].auth)
            for one in auth
        ]
        own = [
            parent.position
            for parent in parents
            if self.events[parent.event_nid - FIRST_EVENT].key == key
        ]
        predecessor: ChainPosition | None = max(own, default=None)
        chain = None if predecessor is None else self._chains[predecessor.chain_nid]
        entry = self.places[nid] = enter(predecessor, chain, -nid, parents)
        self._chains[entry.position.chain_nid] = extended(
            chain if entry.position.sequence_number > 1 else None, entry
        )

    def _texts(self, nid: int) -> tuple[str, str]:
        event = self.events[nid - FIRST_EVENT]
        return event.event_id, user_name(
            event.key - FIRST_USER_KEY
        ) if event.key >= FIRST_USER_KEY else ""

    @property
    def users(self) -> int:
        """Return how many state keys of users there are."""
        return max(event.key for event in self.events) - FIRST_USER_KEY + 1

    async def copy(self, conn: Connection) -> None:
        """Copy into an empty database and analyse it.

        It has everything that reads of states and auth chains need, but no row of the room.
        """
        names = [
            (FIRST_USER_KEY + user, TYPE_MEMBER, user_name(user)) for user in range(self.users)
        ]
        await conn.copy_in("state_keys", ("state_key_nid", "type_nid", "state_key"), names)
        await conn.copy_in("state_groups", GROUP_COLUMNS, [group.row for group in self.groups])
        await conn.copy_in("events", EVENT_COLUMNS.split(), map(_event_record, self.events))
        places, links = all_columns(self.places)
        await conn.copy_in(
            "auth_chains",
            (*ChainColumns._fields, "event_id", "state_key"),
            [(*place, *self._texts(place.event_nid)) for place in places],
        )
        await conn.copy_in(
            "auth_chain_links",
            ("chain_nid", "sequence_number", "target_chain_nid", "target_sequence_number"),
            links,
        )
        for table in ("state_keys", "state_groups", "events", "auth_chains", "auth_chain_links"):
            await conn.execute(f"VACUUM ANALYZE {table}")


def user_name(number: int) -> str:
    """Return a user of a hundred servers, with a name as in `storage.testing`."""
    return f"@user{number + 1}:s{number % 100 + 1}.test"


def _event_record(row: StateEventNumbers) -> tuple[Any, ...]:
    number = row.nid - FIRST_EVENT + 1
    member = row.key >= FIRST_USER_KEY
    times = (number + 1, number, number, number, number)
    names = (ROOM_NID, 1, TYPE_MEMBER if member else row.key, row.key, 1, 0, 5 if member else None)
    flags = (False, False, False, False)
    return (
        row.nid,
        *times,
        row.before,
        row.after,
        1,
        None,
        *names,
        *flags,
        row.event_id,
        None,
        list(row.prev),
        list(row.auth),
        FILLER,
    )


async def appended(store: Store, history: BigRoomHistory) -> RoomBuilder:
    """Append the same history as signed events, through the store."""
    room = RoomBuilder(
        "11",
        servers=[f"s{number + 1}.test" for number in range(100)],
        sign=False,
        checked=False,
        exact=False,
    )
    room.start(user_name(0))
    sent = 0
    for happening in history:
        main, branch = (room, room) if not happening.branch else room.fork(2)
        for side, users in ((main, happening.main), (branch, happening.branch)):
            for user in users:
                side.join(user_name(user), displayname=str(len(room.events)))
        if happening.branch:
            room.merge(main, branch)
        if len(room.events) - sent >= 100:
            await _append(store, room, sent)
            sent = len(room.events)
    await _append(store, room, sent)
    return room


async def _append(store: Store, room: RoomBuilder, sent: int) -> None:
    results = await store.append(room.pdus[sent:])
    if any(result.outcome != "stored" for result in results):
        raise RuntimeError(
            f"not stored: {[result for result in results if result.outcome != 'stored'][:3]}"
        )
