"""A room of a million events and many principals, with its visibility, as nids.

It is too large to be appended for every run. Its history is computed with the engine's pure
functions (`storage.visibility.multirange`, `storage.visibility.multirange`) and loaded by
COPY. `built` returns the same history as events, for ``store.append``. For a small room,
benchmarks/visibility.py checks that both write the same rows of `visibility` and `audiences`.
"""

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from storage import Store
from storage.database.connection import Connection
from storage.ids import server_name_of
from storage.persist.model.rows import UNSEEN, AudienceRow, PrincipalStanding, VisibilityRow
from storage.testing import RoomBuilder
from storage.visibility import multirange

SERVER: Final = "s1.test"
ADMIN: Final = "@admin:s1.test"
ABSENT: Final = "@absent:s1.test"
ROOM_ID: Final = "!big:s1.test"
# the first events of a room: create, join, power levels, join rules, history visibility
START: Final = 5
SHARED: Final = "*shared"
TOGETHER: Final = 500

Action = Literal["join", "leave", "message"]


class VisibleRoomChange(NamedTuple):
    """An event: its action, and its user."""

    action: Action
    user: str


@dataclass(frozen=True, slots=True)
class VisibleRoomHistory:
    """A number of events; users join all along, and a share of them leave and rejoin.

    One is absent nearly all the time.
    """

    events: int
    local: int
    remote: int
    servers: int
    churn: float = 0.1
    seed: int = 1

    def __iter__(self) -> Iterator[VisibleRoomChange]:
        """Yield all events after the first ones of the room."""
        rng = random.Random(self.seed)
        users = [f"@u{number}:{SERVER}" for number in range(self.local - 2)]
        users += [f"@r{number}:h{number % self.servers}.test" for number in range(self.remote)]
        rng.shuffle(users)
        changes = [VisibleRoomChange("join", user) for user in users]
        for user in rng.sample(users, int(len(users) * self.churn)):
            changes += [VisibleRoomChange("leave", user), VisibleRoomChange("join", user)]
        edge = self.events // 200  # the absent user is present in the first and last two hundredths
        total = self.events - START
        places = sorted(rng.sample(range(1, total), len(changes)))
        at = dict(zip(places, changes, strict=True))
        for place in range(total):
            if place in (edge // 2, total - edge // 2):
                yield VisibleRoomChange("join", ABSENT)
            elif place == edge:
                yield VisibleRoomChange("leave", ABSENT)
            else:
                yield at.get(place, VisibleRoomChange("message", ADMIN))


@dataclass(slots=True)
class VisibilityTables:
    """The visibility tables of a room without forks, under "joined".

    They are as `storage.persist.plan.audience` writes them.
    """

    visible: dict[str, VisibilityRow] = field(default_factory=dict)
    audiences: dict[int, AudienceRow] = field(default_factory=dict)
    current: int = 0
    order: int = 0
    written: int = 0

    @classmethod
    def begun(cls) -> "VisibilityTables":
        """Return the tables after the first events of a room."""
        sheet = cls()
        sheet.visible[SHARED] = VisibilityRow(
            multirange.add(multirange.EMPTY, sheet._open(), None), None, 0, 0
        )
        sheet.order = 1
        sheet.happen(VisibleRoomChange("join", ADMIN))
        sheet.order += 2
        row = sheet.visible[SHARED]
        sheet.visible[SHARED] = row._replace(
            audiences=multirange.remove(row.audiences, sheet._open(), None)
        )
        sheet.order += 1
        return sheet

    def happen(self, happening: VisibleRoomChange) -> int:
        """Apply the next event; return its audience."""
        before = self.current
        if happening.action != "message":
            self._move(happening)
        self.order += 1
        return self.current if happening.action == "join" else before

    def _move(self, happening: VisibleRoomChange) -> None:
        joins = happening.action == "join"
        user, server = happening.user, server_name_of(happening.user)
        opened = None
        for name in (server, user) if server == SERVER else (server,):
            row = self.visible.get(name, UNSEEN)
            joined = row.joined_count + (1 if joins else -1)
            standing = PrincipalStanding.IN if joined > 0 else PrincipalStanding.OUT
            if row.current is not standing:
                opened = opened or self._open()
                row = row.placed(opened, None, standing)
            last = self.order + 1 if joins and name == user else row.last_join_topological
            self.visible[name] = row._replace(joined_count=joined, last_join_topological=last)
            self.written += 1

    def _open(self) -> int:
        self.current += multirange.UNIT[0]
        self.audiences[self.current] = AudienceRow(
            0, continued=False, opened_topological=self.order
        )
        self.written += 1
        return self.current


def _raw(user: str, order: int) -> bytes:
    content = {"msgtype": "m.text", "body": f"message number {order} " + "x" * 60}
    event = {
        "type": "m.room.message",
        "room_id": ROOM_ID,
        "sender": user,
        "content": content,
        "depth": order,
    }
    more = {
        "prev_events": [],
        "auth_events": [],
        "origin_server_ts": 1_700_000_000_000 + order,
        "hashes": {"sha256": "x" * 43},
    }
    return json.dumps(event | more | {"signatures": {SERVER: {"ed25519:1": "x" * 86}}}).encode()


EVENT_COLUMNS: Final = (
    *(
        "event_nid",
        "stream_ordering",
        "topological_ordering",
        "depth",
        "origin_server_ts",
        "received_ts",
        "state_group_before",
        "audience",
    ),
    *(
        "room_nid",
        "sender_nid",
        "type_nid",
        "state_key_nid",
        "encoding",
        "writer_nid",
        "membership",
    ),
    *(
        "outlier",
        "backfilled",
        "soft_failed",
        "redacted_form",
        "event_id",
        "prev_events",
        "auth_events",
        "json",
    ),
)


def _record(place: int, happening: VisibleRoomChange, audience: int) -> tuple[object, ...]:
    member = {"join": 5, "leave": 2, "message": None}[happening.action]
    numbers_of = (place, place + 1, place, place, place, place, 1, audience, 1, 1000)
    kind = (8, None, 0, 1, None) if member is None else (2, 2000, 0, 1, member)
    return (
        *numbers_of,
        *kind,
        False,
        False,
        False,
        False,
        f"${place:043d}",
        [place - 1],
        [],
        _raw(happening.user, place),
    )


async def copy(conn: Connection, history: VisibleRoomHistory) -> VisibilityTables:
    """Copy the whole history into an empty database, and analyse it."""
    sheet = VisibilityTables.begun()
    records: list[tuple[object, ...]] = []
    for place, happening in enumerate(history, start=START + 1):
        audience = sheet.happen(happening)
        records.append(_record(place, happening, audience))
        if len(records) == 50_000:
            await conn.copy_in("events", EVENT_COLUMNS, records)
            records = []
    await conn.copy_in("events", EVENT_COLUMNS, records)
    room = (
        1,
        1,
        sheet.current + multirange.UNIT[0],
        1,
        sheet.order + 1,
        sheet.order,
        sheet.current,
        ROOM_ID,
        "11",
        [sheet.order],
    )
    columns = (
        "write_version room_nid next_audience current_state_group last_stream_ordering"
        " max_topological_ordering current_audience"
    )
    await conn.copy_in(
        "rooms", (*columns.split(), "room_id", "room_version", "forward_extremities"), [room]
    )
    await _copy_sheet(conn, sheet)
    for table in ("events", "rooms", "principals", "visibility", "audiences", "missing_events"):
        await conn.execute(f"VACUUM ANALYZE {table}")
    return sheet


async def _copy_sheet(conn: Connection, sheet: VisibilityTables) -> None:
    nids = {
        name: 2 if name == SHARED else nid for nid, name in enumerate(sheet.visible, start=1000)
    }
    names = [(nid, name) for name, nid in nids.items() if name != SHARED]
    await conn.copy_in("principals", ("principal_nid", "name"), names)
    await conn.execute(
        """
        CREATE TEMPORARY TABLE sheet
            (principal_nid int, last_join bigint, joined int, audiences text)
        """
    )
    rows = [
        (nids[name], row.last_join_topological, row.joined_count, multirange.to_text(row.audiences))
        for name, row in sheet.visible.items()
    ]
    await conn.copy_in("sheet", ("principal_nid", "last_join", "joined", "audiences"), rows)
    await conn.execute(
        """
        INSERT INTO visibility
        SELECT last_join, 1, principal_nid, joined, 0, audiences::int8multirange FROM sheet
        """
    )
    await conn.copy_in(
        "audiences",
        ("audience", "room_nid", "branches", "continued", "opened_topological"),
        [
            (number, 1, row.branches, row.continued, row.opened_topological)
            for number, row in sheet.audiences.items()
        ],
    )


def built(history: VisibleRoomHistory) -> list[bytes]:
    """Return the same history as events."""
    room = RoomBuilder("11", sign=False)
    room.start(ADMIN, history_visibility="joined")
    for happening in history:
        match happening.action:
            case "join":
                room.join(happening.user)
            case "leave":
                room.leave(happening.user)
            case "message":
                room.message(happening.user)
    return room.pdus


async def append_all(store: Store, pdus: Sequence[bytes]) -> None:
    """Append them in batches."""
    for at in range(0, len(pdus), TOGETHER):
        await store.append(pdus[at : at + TOGETHER], room_version="11")
