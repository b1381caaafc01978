"""Call every public method of a store with every bad argument: `InputError`, no statement sent.

The table below has an entry for each parameter of each public method. A new method fails until it
has its entries. `Store.append` has tests of its own (tests/persist).
"""

import inspect
import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

import pytest

from storage import EventFilter, SlidingList, SlidingSyncRequest, Store, SyncFilter
from storage.errors import InputError, UnknownEvent, UnknownRoom
from storage.federation import HttpRemote, Memberships, Receiver, Responder, Sender
from storage.ids import EventId, RoomId, UserId
from storage.streams.account_data import AccountData
from storage.streams.cursors import Cursors
from storage.streams.defined_streams import DefinedStream
from storage.streams.receipts import Receipts
from storage.streams.registry import Stream
from storage.streams.to_device import ToDevice
from storage.testing import RoomBuilder, signing_key
from tests.queries.conftest import StatementLog
from tests.queries.rooms import ADMIN, LOCAL, REMOTE, deliver, ids, new_room

Find = Callable[[Store], Any]

OBJECTS: Final[dict[type, Find]] = {
    Store: lambda store: store,
    AccountData: lambda store: store.account_data,
    ToDevice: lambda store: store.to_device,
    Receipts: lambda store: store.receipts,
    Cursors: lambda store: store.cursors,
    DefinedStream: lambda store: store.define_stream("presence"),
    Stream: lambda store: store.streams["events"],
}
ELSEWHERE: Final = {"Store.append"}

TYPES: Final = (*OBJECTS, HttpRemote, Memberships, Receiver, Responder, Sender)
IDS: Final = re.compile(r"\b(RoomId|EventId|UserId|ServerName)\b")
BY_ID: Final = {"state_before", "stripped_state", "refused", "messages"}
"""Mappings by texts or by ids: to a checker, a mapping by one is none by the other."""

BEYOND: Final = (1 << 63, 1 << 64, 10**30, -(10**30))
NO_TEXTS: Final[tuple[Any, ...]] = ("nul\0", "\ud800", 7, b"bytes", ["list"], {})
NO_NUMBERS: Final = (None, True, 1.5, "5", [5])
NO_LISTS: Final = (
    "text",
    b"bytes",
    bytearray(b"bytes"),
    7,
    [7],
    [None],
    ["nul\0"],
    ["\ud800"],
    [b"bytes"],
)
NO_FLAGS: Final = (None, 1, 0, "yes", [True])


def no_ids(sigil: str) -> tuple[Any, ...]:
    return (*NO_TEXTS, None, "", "none", f"{sigil}\0:s1.test", f"{sigil}\udfff:s1.test")


def no_lists_of(sigil: str) -> tuple[Any, ...]:
    return (*NO_LISTS, None, f"{sigil}one:s1.test", [""], ["none"], [f"{sigil}\0:s1.test"])


NO_LIMITS: Final = (*NO_NUMBERS, -1, -(10**30))
NO_POSITIONS: Final = (*NO_NUMBERS, *BEYOND, -1)
NO_LOCAL_USERS: Final = (*no_ids("@"), "@none", REMOTE)
NO_TOKENS: Final = (*NO_TEXTS, "", "nonsense")
NO_CONTENTS: Final = (
    None, 7, "text", b"bytes", ["list"], [("a", 1)], {7: 1}, {None: 1}, {"a": "\ud800"},
    {"\ud800": 1}, {"a": 1 << 64}, {"a": -(10**30)}, {"a": float("nan")},
    {"a": [{"b": (None, float("-inf"))}]}, {"a": object()}, {"a": {1, 2}}, {"a": b"bytes"},
)  # fmt: skip
NO_MEMBERSHIPS: Final = (*NO_TEXTS, None, "", "joined", "Join", 5)
NO_VALUES: Final = (b"bytes", float("nan"), "\ud800", object(), 1 << 64, {7: 1}, "x" * 65_536)
NO_KEYS: Final = (
    "ab",
    7,
    b"ab",
    ["ab"],
    ["m.room.name"],
    [b"ab"],
    ("m.room.member", LOCAL),
    [7],
    [None],
    [("a",)],
    [("a", "b", "c")],
    [{"a", "b"}],
    [("a", 7)],
    [(None, "")],
    [("a", "nul\0")],
    [("\ud800", "")],
)  # fmt: skip
NO_TRANSACTIONS: Final = (
    7, "DEVICE", (), ["DEVICE"], ("DEVICE", "m1", "m2"), {"DEVICE": "m1"}, ("DEVICE", 7),
    (None, "m1"), ("", "m1"), ("DEVICE", ""), ("DEVICE", "nul\0"), ("\ud800", "m1"),
    ("DEVICE", "x" * 256),
)  # fmt: skip
NO_MESSAGES: Final[tuple[Any, ...]] = (
    None,
    7,
    "text",
    [LOCAL],
    {REMOTE: {"DEVICE": {}}},
    {"user": {"DEVICE": {}}},
    {"@\0:s1.test": {"DEVICE": {}}},
    {7: {"DEVICE": {}}},
    {LOCAL: None},
    {LOCAL: "text"},
    {LOCAL: ["DEVICE"]},
    {LOCAL: {7: {}}},
    {LOCAL: {"nul\0": {}}},
    {LOCAL: {"\ud800": {}}},
    *({LOCAL: {"FIRST": {}, "DEVICE": content}} for content in NO_CONTENTS),
)  # fmt: skip


class ArgumentCase(NamedTuple):
    """A valid value for a parameter, or how to find it, and invalid values."""

    right: Any
    wrong: tuple[Any, ...]


def last(room: RoomBuilder) -> Any:
    return room.events[-1].event_id


KEY: Final = signing_key("s1.test")

BY_NAME: Final[dict[str, ArgumentCase]] = {
    "room_id": ArgumentCase(lambda room: room.room_id, no_ids("!")),
    "event_id": ArgumentCase(last, no_ids("$")),
    "room_ids": ArgumentCase(lambda room: [room.room_id], no_lists_of("!")),
    "event_ids": ArgumentCase(lambda room: [last(room)], no_lists_of("$")),
    "from_ids": ArgumentCase(lambda room: [last(room)], no_lists_of("$")),
    "earliest": ArgumentCase([], no_lists_of("$")),
    "latest": ArgumentCase(lambda room: [last(room)], no_lists_of("$")),
    "sets": ArgumentCase(
        lambda room: [[last(room)]],
        (*no_lists_of("$"), ["$one"], [["none"]], [["$\0"]], [None], [7]),
    ),
    "transaction": ArgumentCase(("DEVICE", "m1"), NO_TRANSACTIONS),
    "user_id": ArgumentCase(LOCAL, NO_LOCAL_USERS),
    "user_or_server": ArgumentCase(
        LOCAL, (*NO_TEXTS, "", "@none", REMOTE, "@nul\0:s1.test", "two words")
    ),
    "server_name": ArgumentCase("s2.test", (*NO_TEXTS, "", "@user:s1.test", "two words")),
    "server_names": ArgumentCase(
        ["s2.test"], (*NO_LISTS, None, "s2.test", [""], ["@user:s1.test"], ["two words"])
    ),
    "ignored": ArgumentCase([REMOTE], no_lists_of("@")),
    "types": ArgumentCase(None, NO_LISTS),
    "keys": ArgumentCase(None, NO_KEYS),
    "filter": ArgumentCase(
        EventFilter(), (None, 7, "text", {}, {"types": ["m.room.name"]}, SyncFilter())
    ),
    "limit": ArgumentCase(5, NO_LIMITS),
    "timeline_limit": ArgumentCase(5, NO_LIMITS),
    "rooms_limit": ArgumentCase(5, NO_LIMITS[1:]),
    "to_device_limit": ArgumentCase(5, (0, *NO_LIMITS[1:])),
    "timeout_ms": ArgumentCase(0, NO_LIMITS),
    "timestamp_ms": ArgumentCase(5, NO_NUMBERS),
    "min_depth": ArgumentCase(0, NO_NUMBERS),
    "after": ArgumentCase(0, NO_POSITIONS),
    "upto": ArgumentCase(10, NO_POSITIONS),
    "direction": ArgumentCase("f", (None, "", "B", "\0", 1, ["b"])),
    "from_": ArgumentCase(None, NO_TOKENS),
    "to": ArgumentCase(None, NO_TOKENS),
    "since": ArgumentCase(None, NO_TOKENS),
    "at": ArgumentCase(None, NO_TOKENS),
    "membership": ArgumentCase("join", NO_MEMBERSHIPS),
    "not_membership": ArgumentCase("leave", NO_MEMBERSHIPS),
    "memberships": ArgumentCase(
        ["join", "leave"], (*NO_LISTS, None, "join", ["joined"], [""], ["join", 5])
    ),
    "at_event": ArgumentCase(None, no_ids("$")),
    "reader": ArgumentCase(LOCAL, (*no_ids("@"), "@none")),
    "user_a": ArgumentCase(LOCAL, (*no_ids("@"), "@none")),
    "user_b": ArgumentCase(REMOTE, (*no_ids("@"), "@none")),
    "rel_type": ArgumentCase(None, NO_TEXTS),
    "event_type": ArgumentCase(None, NO_TEXTS),
    "reason": ArgumentCase("timeout", (*NO_TEXTS, None)),
    "redact": ArgumentCase(True, NO_FLAGS),
    "full_state": ArgumentCase(False, NO_FLAGS),
    "aggregations": ArgumentCase(False, NO_FLAGS),
    "events": ArgumentCase([], (*NO_LISTS, None, ["$one"], [{}])),
    "with_room_id": ArgumentCase(True, NO_FLAGS),
    "as_state": ArgumentCase(False, NO_FLAGS),
    "recurse": ArgumentCase(False, NO_FLAGS),
    "rewind": ArgumentCase(False, NO_FLAGS),
    "type": ArgumentCase("m.room.name", (*NO_TEXTS, None)),
    "state_key": ArgumentCase("", NO_TEXTS),
    "redacts": ArgumentCase(None, no_ids("$")),
    "signing_key": ArgumentCase(KEY, (7, "key", b"key", [KEY], {})),
    "type_": ArgumentCase("m.tag", (*NO_TEXTS, None)),
    "content": ArgumentCase({"tags": {"u.work": {"order": 0.5}}, "none": None}, NO_CONTENTS),
    "data": ArgumentCase({"ts": 5}, NO_CONTENTS),
    "receipt_type": ArgumentCase("m.read", (*NO_TEXTS, None)),
    "thread_id": ArgumentCase("main", NO_TEXTS),
    "device_id": ArgumentCase("DEVICE", (*NO_TEXTS, None)),
    "instance_name": ArgumentCase(None, NO_TEXTS),
    "messages": ArgumentCase({LOCAL: {"DEVICE": {"type": "m.dummy"}}}, NO_MESSAGES),
}

OF_METHOD: Final[dict[str, ArgumentCase]] = {
    "Store.erase_user.user_id": ArgumentCase("@gone:s3.test", (*no_ids("@"), "@none")),
    "Store.restore_user.user_id": ArgumentCase("@gone:s3.test", (*no_ids("@"), "@none")),
    "Store.forget.user_id": ArgumentCase("@none:s1.test", NO_LOCAL_USERS),
    "Store.sharing_changes.since": ArgumentCase(None, (*NO_TOKENS, None)),
    "Store.sharing_changes.to": ArgumentCase(None, (*NO_TOKENS, None)),
    "Store.memberships_of.user_id": ArgumentCase(REMOTE, (*no_ids("@"), "@none")),
    "Store.users_sharing.user_id": ArgumentCase(REMOTE, (*no_ids("@"), "@none")),
    "Store.state_at_leave.user_id": ArgumentCase(REMOTE, (*no_ids("@"), "@none")),
    "Store.membership.user_id": ArgumentCase(REMOTE, (*no_ids("@"), "@none")),
    "Store.event.event_id": ArgumentCase(
        last, ()
    ),  # an id that cannot be is the id of nothing: None (test_errors.py)
    "Store.events.event_ids": ArgumentCase(lambda room: [last(room)], (None, 7, "$one", b"bytes")),
    "Store.sync.filter": ArgumentCase(
        SyncFilter(), (None, 7, "text", {}, {"rooms": []}, EventFilter())
    ),
    "Store.create_room.creator": ArgumentCase(LOCAL, NO_LOCAL_USERS),
    "Store.create_room.room_version": ArgumentCase("11", (*NO_TEXTS, None, "", "0", "none")),
    "Store.create_room.content": ArgumentCase({"m.federate": False}, NO_CONTENTS),
    "Store.create_room.initial_state": ArgumentCase(
        [], (7, None, "text", [7], ["ab"], [("a", "b")], [("a", "b", 7)], [(7, "", {})])
    ),
    "Store.send.sender": ArgumentCase(ADMIN, NO_LOCAL_USERS),
    "Store.send.content": ArgumentCase({"name": "one"}, NO_CONTENTS),
    "Store.send.timestamp_ms": ArgumentCase(5, NO_POSITIONS),
    "Store.template.sender": ArgumentCase(ADMIN, no_ids("@")),
    "Store.template.content": ArgumentCase({"name": "one"}, NO_CONTENTS),
    "Store.positions_of.token": ArgumentCase(None, NO_TOKENS),
    "AccountData.set.room_id": ArgumentCase(None, no_ids("!")[:-4]),
    "AccountData.get.room_id": ArgumentCase(None, no_ids("!")[:-4]),
    "Store.sync.include": ArgumentCase(["receipts"], (*NO_LISTS, None, ["typing"])),
    "Store.threads.include": ArgumentCase("all", (*NO_TEXTS, None, "", "some")),
    "Store.unread.types": ArgumentCase(["m.room.message"], (*NO_LISTS, None)),
    "Store.unread.count_max": ArgumentCase(5, NO_LIMITS),
    "Store.sliding_sync.request": ArgumentCase(
        SlidingSyncRequest(lists={"all": SlidingList([(0, 19)])}),
        (None, 7, "text", {}, SlidingList()),
    ),
    "Store.sliding_sync.pos": ArgumentCase(None, NO_TOKENS),
    "Receipts.set.user_id": ArgumentCase(REMOTE, (*no_ids("@"), "@none")),
    "Receipts.of_room.user_id": ArgumentCase(REMOTE, (*no_ids("@"), "@none")),
    "ToDevice.inbox.limit": ArgumentCase(5, NO_POSITIONS),
    "Stream.rows.limit": ArgumentCase(5, NO_POSITIONS),
    "Store.define_stream.name": ArgumentCase("typing", (*NO_TEXTS, None, "", "events", "A", "a b")),
    "Store.define_stream.keep_ms": ArgumentCase(None, NO_POSITIONS),
    "Store.stream.name": ArgumentCase("typing", (*NO_TEXTS, None, "", "events")),
    "DefinedStream.publish.key": ArgumentCase("key", (*NO_TEXTS, None, "", "x" * 513)),
    "DefinedStream.publish.value": ArgumentCase({"a": None}, NO_VALUES),
    "DefinedStream.publish.wakes": ArgumentCase(
        [LOCAL, "!room:s1.test"], (*NO_LISTS, None, [""], ["none"], LOCAL, ["@none"])
    ),
    "DefinedStream.rows.keys": ArgumentCase(None, NO_LISTS),
    "DefinedStream.rows.limit": ArgumentCase(5, NO_POSITIONS),
    "Cursors.get.name": ArgumentCase("push", (*NO_TEXTS, None, "", "x" * 256)),
    "Cursors.set.name": ArgumentCase("push", (*NO_TEXTS, None, "", "x" * 256)),
    "Cursors.set.position": ArgumentCase(5, NO_POSITIONS),
}


WITH_TOKENS: Final = ("positions_of", "sharing_changes")


def public_methods() -> Iterator[tuple[type, str]]:
    for owner in OBJECTS:
        for name, _ in inspect.getmembers(owner, inspect.isfunction):
            if not name.startswith("_") and f"{owner.__name__}.{name}" not in ELSEWHERE:
                yield owner, name


def parameters(owner: type, method: str) -> list[str]:
    """Return the names without the object: `self`, or `store` in modules of `storage.store`."""
    return list(inspect.signature(getattr(owner, method)).parameters)[1:]


def given(owner: type, method: str, parameter: str) -> ArgumentCase:
    return OF_METHOD.get(f"{owner.__name__}.{method}.{parameter}") or BY_NAME[parameter]


METHODS: Final = [
    (owner, method) for owner, method in public_methods() if parameters(owner, method)
]


@pytest.fixture
async def room(store: Store) -> RoomBuilder:
    made = new_room(members=[LOCAL, REMOTE])
    made.message(ADMIN)
    await deliver(store, made)
    return made


async def call(store: Store, room: RoomBuilder, owner: type, method: str, **wrong: Any) -> Any:
    """Call it with what is right, but for what is named."""
    arguments: dict[str, Any] = {}
    for name in parameters(owner, method):
        right = given(owner, method, name).right
        arguments[name] = right(room) if callable(right) else right
    store.define_stream("typing")
    if method in WITH_TOKENS:
        token = (await store.sync(LOCAL)).next_batch
        arguments |= dict.fromkeys(arguments.keys() & {"token", "since", "to"}, token)
    answer = getattr(OBJECTS[owner](store), method)(**{**arguments, **wrong})
    return await answer if inspect.isawaitable(answer) else answer


@pytest.mark.parametrize(
    "owner, method", METHODS, ids=[f"{owner.__name__}.{method}" for owner, method in METHODS]
)
async def test_a_bad_argument_is_refused_before_anything_is_sent(
    store: Store, room: RoomBuilder, statements: StatementLog, owner: type, method: str
) -> None:
    await call(store, room, owner, method)
    for parameter in parameters(owner, method):
        optional = inspect.signature(getattr(owner, method)).parameters[parameter].default is None
        for wrong in given(owner, method, parameter).wrong:
            if wrong is None and optional:
                continue
            statements.take()
            with pytest.raises(InputError) as caught:
                await call(store, room, owner, method, **{parameter: wrong})
                pytest.fail(f"{parameter}={wrong!r} was taken")
            assert str(caught.value)
            told = [one for one in statements.take() if method not in WITH_TOKENS]
            assert told == [], f"{parameter}={wrong!r}"


def test_the_table_has_no_more_than_there_is() -> None:
    """Else an entry would stand for a parameter that was renamed, and test nothing."""
    named = {
        f"{owner.__name__}.{method}.{parameter}"
        for owner, method in METHODS
        for parameter in parameters(owner, method)
    }
    assert OF_METHOD.keys() <= named
    assert BY_NAME.keys() <= {name.rpartition(".")[2] for name in named}
    assert {"Store.sync", "Store.is_resident", "ToDevice.send", "Stream.rows"} <= {
        f"{owner.__name__}.{method}" for owner, method in METHODS
    }


NO_NAMES: Final[tuple[Any, ...]] = ("m.room.message", b"bytes", 7, [7], [None], [b"bytes"])


@pytest.mark.parametrize("name", ["types", "not_types", "senders", "not_senders"])
def test_a_text_in_place_of_a_list_of_a_filter(name: str) -> None:
    for wrong in NO_NAMES:
        with pytest.raises(InputError, match=f"^{name} "):
            EventFilter(**{name: wrong})
    with pytest.raises(
        InputError,
        match=rf"^{name} is 'm.room.message': a list is wanted, write \['m.room.message'\]$",
    ):
        EventFilter(**{name: "m.room.message"})  # type: ignore[arg-type]
    once = EventFilter(**{name: iter(["a", "nul\0", "b"])})  # type: ignore[arg-type]
    assert (getattr(once, name), getattr(once, name)) == (("a", "b"), ("a", "b"))


def test_a_filter_of_a_sync() -> None:
    for name in ("rooms", "not_rooms"):
        for wrong in NO_NAMES:
            with pytest.raises(InputError, match=f"^{name} "):
                SyncFilter(**{name: wrong})
    others: list[tuple[str, Any]] = [
        ("not_rooms", None),
        ("timeline", None),
        ("state", {"types": []}),
        ("lazy_load_members", 1),
    ]
    for name, wrong in others:
        with pytest.raises(InputError, match=f"^{name} "):
            SyncFilter(**{name: wrong})
    with pytest.raises(InputError, match=r"^contains_url "):
        EventFilter(contains_url="yes")  # type: ignore[arg-type]


async def test_rooms_of_a_filter_that_cannot_be_are_none(store: Store, room: RoomBuilder) -> None:
    for wrong in ("!nul\0:s1.test", "!\ud800:s1.test", "none", ""):
        assert (await store.sync(LOCAL, filter=SyncFilter(rooms=[RoomId(wrong)]))).join == {}
        assert (
            await store.sync(LOCAL, filter=SyncFilter(not_rooms=[RoomId(wrong)]))
        ).join.keys() == {room.room_id}


SMALL: Final[dict[str, Callable[[Store, RoomId], Any]]] = {
    "account data": lambda store, room: store.account_data.set(
        UserId(LOCAL), "m.new", {}, room_id=room
    ),
    "account data of": lambda store, room: store.account_data.get(UserId(LOCAL), room_id=room),
    "receipts of": lambda store, room: store.receipts.of_room(room),
}


@pytest.mark.parametrize("question", SMALL)
async def test_an_unknown_room_is_refused_and_leaves_nothing(
    store: Store, room: RoomBuilder, question: str
) -> None:
    left = "SELECT (SELECT count(*) FROM principals) + (SELECT count(*) FROM event_types)"
    async with store.database.connection() as conn:
        before = await conn.fetchval(left)
        with pytest.raises(UnknownRoom):
            await SMALL[question](store, RoomId("!none:s1.test"))
        assert await conn.fetchval(left) == before
    await SMALL[question](store, room.room_id)


async def test_a_receipt_that_is_refused_leaves_nothing(store: Store, room: RoomBuilder) -> None:
    other = new_room(seed=1)
    await deliver(store, other)
    user, event = UserId("@new:s4.test"), room.events[-1].event_id
    outside: list[tuple[str, str, type[InputError]]] = [
        ("!none:s1.test", event, UnknownRoom),
        (room.room_id, "$one", UnknownEvent),
        (room.room_id, other.events[-1].event_id, InputError),
    ]
    left = "SELECT count(*) FROM principals"
    async with store.database.connection() as conn:
        before = await conn.fetchval(left)
        for room_id, event_id, error in outside:
            with pytest.raises(error) as caught:
                await store.receipts.set(RoomId(room_id), "m.read", user, EventId(event_id), {})
            assert type(caught.value) is error
        assert await conn.fetchval(left) == before
    await store.receipts.set(room.room_id, "m.read", user, event, {})


async def test_what_is_right_is_stored_as_it_is(store: Store, room: RoomBuilder) -> None:
    content = {"nul": "\0", "largest": (1 << 63) - 1, "none": None, "text": "null", "half": 0.5}
    await store.account_data.set(UserId(LOCAL), "m.odd", content, room_id=room.room_id)
    assert await store.account_data.get(UserId(LOCAL), room_id=room.room_id) == {"m.odd": content}
    assert (await store.account_data.get(UserId(LOCAL))) == {}
    await store.to_device.send({UserId(LOCAL): {"D": content}})
    assert len(await store.to_device.inbox(UserId(LOCAL), "D")) == 1
    assert ids(room.events)


@pytest.mark.parametrize("subject", TYPES, ids=lambda subject: subject.__name__)
def test_every_argument_that_names_an_id_takes_text(subject: type) -> None:
    """Results carry the types of ids, and what a client sends is text."""
    for name, call in inspect.getmembers(subject, callable):
        if name[0] != "_" and not inspect.isclass(call):
            for parameter in inspect.signature(call).parameters.values():
                if parameter.name not in BY_ID | {"ignored"}:
                    found = IDS.search(str(parameter.annotation))
                    assert found is None, f"{name}({parameter})"
