"""Every query with every bad argument: a typed error or a documented clamp, no driver error."""

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

import storage
from storage import EventFilter, Store
from storage.errors import InputError, InvalidIdentifier, InvalidToken, UnknownEvent, UnknownRoom
from storage.ids import EventId, RoomId
from storage.streams.positions import VectorPosition
from storage.streams.tokens import PaginationToken, RoomsToken, SyncToken
from storage.testing import RoomBuilder
from tests.queries.rooms import ADMIN, LOCAL, OTHER, REMOTE, deliver, ids, new_room

Ask = Callable[[Store, Any], Awaitable[Any]]

NOWHERE, NO_EVENT = RoomId("!none:s1.test"), EventId("$none")
UNWRITABLE = (
    "!\0:s1.test",
    "$\0",
    "@\0:s1.test",
    "!\ud800:s1.test",
    "$\udfff",
    "@\ud800:s1.test",
    "\0",
    "\ud800",
)
NO_IDS: tuple[Any, ...] = (*UNWRITABLE, "", "none", None, 7, b"$bytes", ["$list"], {})
LIMITS_REFUSED = (-1, -(10**30), True, False, 1.5, "10", None)
TOKENS_REFUSED = (
    "",
    "nonsense",
    "p1~",
    "\0",
    "\ud800",
    "p1~00000000~1.1~00000000",
    "x" * 10_000,
    7,
)


@pytest.fixture
async def room(store: Store) -> RoomBuilder:
    made = new_room(members=[LOCAL])
    for number in range(3):
        made.message(ADMIN, str(number))
    await deliver(store, made)
    return made


# --------------------------------------------------------------------------------------------------
# ids

OF_ROOM: dict[str, Ask] = {
    "current_state": lambda store, room: store.current_state(room),
    "current_state of types": lambda store, room: store.current_state(room, types=["m.room.name"]),
    "forward_extremities": lambda store, room: store.forward_extremities(room),
    "backward_extremities": lambda store, room: store.backward_extremities(room),
    "gaps": lambda store, room: store.gaps(room),
    "gap_failed": lambda store, room: store.gap_failed(room, [NO_EVENT], "timeout"),
    "messages": lambda store, room: store.messages(room, LOCAL),
    "messages forwards": lambda store, room: store.messages(room, LOCAL, direction="f"),
    "event_near": lambda store, room: store.event_near(room, LOCAL, 0, "f"),
    "backfill": lambda store, room: store.backfill(room, [NO_EVENT], 10),
    "missing_events": lambda store, room: store.missing_events(room, [], [NO_EVENT]),
}


@pytest.mark.parametrize("question", OF_ROOM)
async def test_rooms(store: Store, room: RoomBuilder, question: str) -> None:
    ask = OF_ROOM[question]
    await ask(store, room.room_id)
    with pytest.raises(UnknownRoom):
        await ask(store, NOWHERE)
    for wrong in NO_IDS:
        with pytest.raises(InvalidIdentifier):
            await ask(store, wrong)


OF_EVENT: dict[str, Ask] = {
    "state_before": lambda store, event: store.state_before(event),
    "state_before of types": lambda store, event: store.state_before(event, types=["m.room.name"]),
    "state_after": lambda store, event: store.state_after(event),
    "states_before": lambda store, event: store.states_before([event]),
    "states_after": lambda store, event: store.states_after([event]),
    "context": lambda store, event: store.context(event, LOCAL),
    "relations": lambda store, event: store.relations(event, LOCAL),
    "state_ids": lambda store, event: store.state_ids(event),
    "event_auth": lambda store, event: store.event_auth(event),
    "auth_chain_ids": lambda store, event: store.auth_chain_ids([event]),
    "explain_visibility": lambda store, event: store.explain_visibility(event, LOCAL),
}


@pytest.mark.parametrize("question", OF_EVENT)
async def test_events(store: Store, room: RoomBuilder, question: str) -> None:
    ask = OF_EVENT[question]
    await ask(store, room.events[-1].event_id)
    with pytest.raises(UnknownEvent):
        await ask(store, NO_EVENT)
    for wrong in NO_IDS:
        with pytest.raises(InvalidIdentifier):
            await ask(store, wrong)


OF_EVENTS: dict[str, Ask] = {
    "visible_to_user": lambda store, event: store.visible_to_user(LOCAL, [event]),
    "visible_to_server": lambda store, event: store.visible_to_server("s2.test", [event]),
    "aggregations": lambda store, event: store.aggregations(LOCAL, [event]),
}


@pytest.mark.parametrize("question", OF_EVENTS)
async def test_sets_of_events(store: Store, question: str) -> None:
    """Unknown ones are passed over."""
    ask = OF_EVENTS[question]
    assert not await ask(store, NO_EVENT)
    for wrong in NO_IDS:
        with pytest.raises(InvalidIdentifier):
            await ask(store, wrong)


async def test_an_event_that_cannot_be_is_none(store: Store, room: RoomBuilder) -> None:
    for wrong in NO_IDS:
        assert await store.event(wrong) is None
    asked: list[Any] = [*NO_IDS, NO_EVENT, room.events[0].event_id]
    assert [*await store.events(asked)] == [room.events[0].event_id]
    assert [*await store.events(asked, redact=False)] == [room.events[0].event_id]


async def client_events(store: Store, room: RoomBuilder, user: Any) -> Any:
    return await store.client_events(user, (await store.events(ids(room.events))).values())


OF_USER: dict[str, Callable[[Store, RoomBuilder, Any], Awaitable[Any]]] = {
    "sync": lambda store, _, user: store.sync(user),
    "messages": lambda store, room, user: store.messages(room.room_id, user),
    "context": lambda store, room, user: store.context(room.events[-1].event_id, user),
    "relations": lambda store, room, user: store.relations(room.events[-1].event_id, user),
    "aggregations": lambda store, room, user: store.aggregations(user, ids(room.events)),
    "client_events": client_events,
    "event_near": lambda store, room, user: store.event_near(room.room_id, user, 0, "f"),
    "visible_to_user": lambda store, room, user: store.visible_to_user(user, ids(room.events)),
    "rooms_of": lambda store, _, user: store.rooms_of(user),
}


@pytest.mark.parametrize("question", OF_USER)
async def test_users(store: Store, room: RoomBuilder, question: str) -> None:
    """A user who was never in the room gets nothing, and no error says more.

    A query for an event reports it as unknown to them.
    """
    ask = OF_USER[question]
    assert await ask(store, room, LOCAL) is not None
    for stranger in (OTHER, "@never:s1.test"):
        if question in ("context", "relations"):
            with pytest.raises(UnknownEvent):
                await ask(store, room, stranger)
        else:
            answer = await ask(store, room, stranger)
            assert not getattr(answer, "chunk", getattr(answer, "join", answer))
    for wrong in (*NO_IDS, REMOTE, "@none"):
        with pytest.raises(InvalidIdentifier):
            await ask(store, room, wrong)


OF_SERVER: dict[str, Callable[[Store, RoomBuilder, Any], Awaitable[Any]]] = {
    "backfill": lambda store, room, server: store.backfill(
        room.room_id, [room.events[-1].event_id], 9, server_name=server
    ),
    "missing_events": lambda store, room, server: store.missing_events(
        room.room_id, [], ids(room.events[-1:]), server_name=server
    ),
    "visible_to_server": lambda store, room, server: store.visible_to_server(
        server, ids(room.events)
    ),
    "gap_failed": lambda store, room, server: store.gap_failed(
        room.room_id, [NO_EVENT], "", server_names=[server]
    ),
    "server_up": lambda store, _, server: store.server_up(server),
}


@pytest.mark.parametrize("question", OF_SERVER)
async def test_servers(store: Store, room: RoomBuilder, question: str) -> None:
    ask = OF_SERVER[question]
    await ask(store, room, "never.test")
    for wrong in ("", "@user:s1.test", "two words", "nul\0", "\ud800", 7):
        with pytest.raises(InvalidIdentifier):
            await ask(store, room, wrong)


# --------------------------------------------------------------------------------------------------
# numbers

OF_LIMIT: dict[str, Callable[[Store, RoomBuilder, Any], Awaitable[Any]]] = {
    "messages": lambda store, room, limit: store.messages(room.room_id, LOCAL, limit=limit),
    "messages forwards": lambda store, room, limit: store.messages(
        room.room_id, LOCAL, limit=limit, direction="f"
    ),
    "context": lambda store, room, limit: store.context(
        room.events[-1].event_id, LOCAL, limit=limit
    ),
    "relations": lambda store, room, limit: store.relations(
        room.events[-1].event_id, LOCAL, limit=limit
    ),
    "sync": lambda store, _, limit: store.sync(LOCAL, timeline_limit=limit),
    "backfill": lambda store, room, limit: store.backfill(
        room.room_id, [room.events[-1].event_id], limit
    ),
    "missing_events": lambda store, room, limit: store.missing_events(
        room.room_id, [], ids(room.events[-1:]), limit=limit
    ),
}


@pytest.mark.parametrize("question", OF_LIMIT)
async def test_limits(store: Store, room: RoomBuilder, question: str) -> None:
    ask = OF_LIMIT[question]
    for wrong in LIMITS_REFUSED:
        with pytest.raises(InputError):
            await ask(store, room, wrong)
    nothing = await ask(store, room, 0)
    assert not getattr(
        nothing, "chunk", getattr(nothing, "events_before", [] if question == "sync" else nothing)
    )
    for large in (10**6, 2**31, 2**63, 10**30):
        await ask(store, room, large)


async def test_a_limit_is_taken_down_to_the_largest(dsn: str) -> None:
    async with storage.open(
        dsn, server_name="s1.test", config=storage.Config(page_limit_max=2)
    ) as store:
        made = new_room(members=[LOCAL])
        await deliver(store, made)
        last = [made.events[-1].event_id]
        assert len((await store.messages(made.room_id, LOCAL, limit=10**6)).chunk) == 2
        assert len(await store.backfill(made.room_id, last, 10**6)) == 2
        assert len(await store.missing_events(made.room_id, [], last, limit=10**6)) == 2
        found = await store.context(made.events[3].event_id, LOCAL, limit=10**6)
        assert len(found.events_before) + len(found.events_after) == 2


async def test_other_numbers_are_taken_to_the_nearest_possible(
    store: Store, room: RoomBuilder
) -> None:
    for past, future in ((-(2**63), 2**63), (-(10**30), 10**30)):
        first = await store.event_near(room.room_id, LOCAL, past, "f")
        assert first is not None
        assert first.event_id == room.events[0].event_id
        assert await store.event_near(room.room_id, LOCAL, past, "b") is None
        assert await store.event_near(room.room_id, LOCAL, future, "f") is None
        latest = ids(room.events[-1:])
        assert await store.missing_events(room.room_id, [], latest, min_depth=future) == []
        assert ids(
            await store.missing_events(room.room_id, [], latest, limit=100, min_depth=past)
        ) == ids(room.events[:-1])
    for wrong in (True, 1.5, "1", None):
        with pytest.raises(InputError):
            await store.event_near(room.room_id, LOCAL, wrong, "f")  # type: ignore[arg-type]
        with pytest.raises(InputError):
            await store.missing_events(room.room_id, [], [NO_EVENT], min_depth=wrong)  # type: ignore[arg-type]


async def test_directions(store: Store, room: RoomBuilder) -> None:
    for wrong in ("", "B", "up", "\0", None, 1):
        for asked in (
            store.messages(room.room_id, LOCAL, direction=wrong),  # type: ignore[arg-type]
            store.relations(room.events[-1].event_id, LOCAL, direction=wrong),  # type: ignore[arg-type]
            store.event_near(room.room_id, LOCAL, 0, wrong),  # type: ignore[arg-type]
        ):
            with pytest.raises(InputError):
                await asked


# --------------------------------------------------------------------------------------------------
# tokens

OF_TOKEN: dict[str, Callable[[Store, RoomBuilder, Any], Awaitable[Any]]] = {
    "messages": lambda store, room, token: store.messages(room.room_id, LOCAL, from_=token),
    "messages to": lambda store, room, token: store.messages(room.room_id, LOCAL, to=token),
    "messages forwards": lambda store, room, token: store.messages(
        room.room_id, LOCAL, from_=token, direction="f"
    ),
    "relations": lambda store, room, token: store.relations(
        room.events[-1].event_id, LOCAL, from_=token
    ),
    "relations to": lambda store, room, token: store.relations(
        room.events[-1].event_id, LOCAL, to=token
    ),
    "sync": lambda store, _, token: store.sync(LOCAL, since=token),
}


@pytest.mark.parametrize("question", OF_TOKEN)
async def test_tokens(store: Store, room: RoomBuilder, question: str) -> None:
    ask = OF_TOKEN[question]
    upto = SyncToken.parse((await store.sync(LOCAL)).next_batch, store.deployment_id)
    page, rooms = PaginationToken(5, 5), RoomsToken(upto, 1, 1)
    damaged = page.print(store.deployment_id)[:-1] + "x"
    of_other_kind = page if question == "sync" else rooms
    for wrong in (
        *TOKENS_REFUSED,
        damaged,
        of_other_kind.print(store.deployment_id),
        upto.print("another"),
        page.print("another"),
    ):
        with pytest.raises(InvalidToken):
            await ask(store, room, wrong)


async def test_tokens_of_the_future_stand_at_the_end(store: Store, room: RoomBuilder) -> None:
    ahead = PaginationToken(2**63 - 1, 2**63 - 1).print(store.deployment_id)
    later = SyncToken.of({"events": VectorPosition(2**62)}).print(store.deployment_id)
    for token in (ahead, later):
        assert (
            ids((await store.messages(room.room_id, LOCAL, from_=token, limit=100)).chunk)
            == ids(room.events)[::-1]
        )
        assert (await store.messages(room.room_id, LOCAL, from_=token, direction="f")).chunk == []
    answer = await store.sync(LOCAL, since=later)
    assert answer.is_empty
    room.message(ADMIN, "new")
    await deliver(store, room)
    assert (
        len((await store.sync(LOCAL, since=answer.next_batch)).join[room.room_id].timeline.events)
        == 1
    )


async def test_a_token_of_another_room_is_a_place_in_this_one(
    store: Store, room: RoomBuilder
) -> None:
    """It names a place in an order, and shows nothing that may not be seen."""
    other = new_room(seed=1, visibility="joined")
    for number in range(20):
        other.message(ADMIN, str(number))
    await deliver(store, other)
    strange = (await store.messages(other.room_id, ADMIN, limit=2)).end
    page = await store.messages(room.room_id, LOCAL, from_=strange, limit=100)
    assert set(ids(page.chunk)) <= set(ids(room.events))
    own = (await store.messages(room.room_id, LOCAL, limit=1)).end
    assert (await store.messages(other.room_id, LOCAL, from_=own)).chunk == []


# --------------------------------------------------------------------------------------------------
# other texts

TEXTS: dict[str, Callable[[Store, RoomBuilder, Any], Awaitable[Any]]] = {
    "types of the current state": lambda store, room, text: store.current_state(
        room.room_id, types=[text]
    ),
    "types of a state": lambda store, room, text: store.state_before(
        room.events[-1].event_id, types=[text]
    ),
    "keys of a state": lambda store, room, text: store.state_before(
        room.events[-1].event_id, keys=[("m.room.member", text)]
    ),
    "reason": lambda store, room, text: store.gap_failed(room.room_id, [NO_EVENT], text),
    "ignored of messages": lambda store, room, text: store.messages(
        room.room_id, LOCAL, ignored=[text]
    ),
    "ignored of context": lambda store, room, text: store.context(
        room.events[-1].event_id, LOCAL, ignored=[text]
    ),
    "ignored of relations": lambda store, room, text: store.relations(
        room.events[-1].event_id, LOCAL, ignored=[text]
    ),
    "ignored of aggregations": lambda store, room, text: store.aggregations(
        LOCAL, ids(room.events), ignored=[text]
    ),
    "ignored of sync": lambda store, _, text: store.sync(LOCAL, ignored=[text]),
    "rel_type": lambda store, room, text: store.relations(
        room.events[-1].event_id, LOCAL, rel_type=text
    ),
    "event_type": lambda store, room, text: store.relations(
        room.events[-1].event_id, LOCAL, event_type=text
    ),
}


@pytest.mark.parametrize("question", TEXTS)
async def test_texts(store: Store, room: RoomBuilder, question: str) -> None:
    for wrong in ("nul\0", "\ud800", 7):
        with pytest.raises(InvalidIdentifier):
            await TEXTS[question](store, room, wrong)


async def test_a_filter_of_what_cannot_be_finds_nothing(store: Store, room: RoomBuilder) -> None:
    for wrong in ("nul\0", "\ud800", ""):
        for one in (EventFilter(types=[wrong]), EventFilter(senders=[wrong])):
            assert (await store.messages(room.room_id, LOCAL, filter=one)).chunk == []
            assert (
                await store.context(room.events[-1].event_id, LOCAL, filter=one)
            ).events_before == []
        nothing_less = EventFilter(not_types=[wrong], not_senders=[wrong])
        assert len(
            (await store.messages(room.room_id, LOCAL, limit=100, filter=nothing_less)).chunk
        ) == len(room.events)


@pytest.mark.parametrize("call", ["context", "relations", "recursive relations"])
async def test_an_event_of_another_room_is_unknown(store: Store, call: str) -> None:
    """Client-server API: the path of the request names the room of the event."""
    room, other = new_room(members=[LOCAL]), new_room(seed=1, members=[LOCAL])
    said = room.message(ADMIN, "said")
    room.react(LOCAL, said)
    await deliver(store, room)
    await deliver(store, other)
    middle = (await store.messages(room.room_id, LOCAL, limit=1)).end
    assert middle is not None

    async def ask(room_id: RoomId | None, **how: Any) -> object:
        if call == "context":
            return await store.context(said.event_id, LOCAL, room_id=room_id)
        recurse = call != "relations"
        return await store.relations(said.event_id, LOCAL, room_id=room_id, recurse=recurse, **how)

    assert await ask(room.room_id) == await ask(None)
    ways: list[dict[str, Any]] = [{}, {"direction": "f"}, {"from_": middle}]
    for how in ways if call != "context" else [{}]:
        for room_id in (other.room_id, RoomId("!none:s1.test")):
            with pytest.raises(UnknownEvent):
                await ask(room_id, **how)
    with pytest.raises(InvalidIdentifier):
        await ask(RoomId("no room"))
