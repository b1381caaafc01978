"""Events of local users: built on the room as it is, signed, authorised, stored."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

import storage
from storage import Store, responses
from storage.errors import (
    AuthDenied,
    InputError,
    InvalidEvent,
    InvalidIdentifier,
    StateUnknown,
    UnknownRoom,
)
from storage.event import event_id, sign
from storage.ids import EventId, RoomId
from storage.testing import RoomBuilder, signing_key, verify_keys
from tests.persist.tables import row_counts

pytestmark = pytest.mark.every_postgres

VERSIONS = [str(number) for number in range(1, 13)]
ALICE, BOB, CAROL = "@alice:s1.test", "@bob:s1.test", "@carol:s1.test"
REMOTE = "@remote:s2.test"
PUBLIC = ("m.room.join_rules", "", {"join_rule": "public"})
TEXT = {"msgtype": "m.text", "body": "hello"}


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(
        dsn, server_name="s1.test", signing_key=signing_key("s1.test")
    ) as opened:
        yield opened


async def joined(store: Store, room_id: RoomId, *users: str) -> None:
    for user in users:
        await store.send(room_id, user, "m.room.member", {"membership": "join"}, state_key=user)


async def all_pdus(store: Store, room_id: RoomId) -> list[bytes]:
    found = await store.backfill(room_id, await store.forward_extremities(room_id), 1_000)
    return [event.raw for event in reversed(found)]


@pytest.mark.parametrize("version", VERSIONS)
async def test_another_server_accepts_what_is_sent(
    store: Store, another_dsn: str, version: str
) -> None:
    room_id = await store.create_room(ALICE, room_version=version, initial_state=[PUBLIC])
    await joined(store, room_id, BOB)
    message = await store.send(room_id, BOB, "m.room.message", TEXT)
    topic = await store.send(room_id, ALICE, "m.room.topic", {"topic": "one"}, state_key="")
    redaction = await store.send(
        room_id, BOB, "m.room.redaction", {}, redacts=str(message.event_id)
    )
    assert {message.outcome, topic.outcome, redaction.outcome} == {"stored"}
    async with storage.open(another_dsn, server_name="s2.test") as other:
        results = await other.append(
            await all_pdus(store, room_id), verify_keys=verify_keys(["s1.test"])
        )
        assert [one.outcome for one in results] == ["stored"] * len(results)
        assert len(results) == 8
        assert await other.current_state(room_id) == await store.current_state(room_id)
        redacted = await other.event(EventId(str(message.event_id)))
        assert redacted is not None
        assert redacted.redacted_by == redaction.event_id
    assert await store.forward_extremities(room_id) == {redaction.event_id}


async def test_concurrent_sends_leave_one_extremity(store: Store) -> None:
    room_id = await store.create_room(ALICE, initial_state=[PUBLIC])
    results = await asyncio.gather(
        *(store.send(room_id, ALICE, "m.room.message", {"n": n}) for n in range(40))
    )
    assert [one.outcome for one in results] == ["stored"] * 40
    assert len({one.event_id for one in results}) == 40
    assert len(await store.forward_extremities(room_id)) == 1


async def test_concurrent_sends_of_two_stores_leave_one_extremity(store: Store, dsn: str) -> None:
    room_id = await store.create_room(ALICE, initial_state=[PUBLIC])
    async with storage.open(
        dsn, instance_name="second", signing_key=signing_key("s1.test")
    ) as other:
        results = await asyncio.gather(
            *(
                (store, other)[n % 2].send(room_id, ALICE, "m.room.message", {"n": n})
                for n in range(40)
            )
        )
        assert [one.outcome for one in results] == ["stored"] * 40
        assert len(await store.forward_extremities(room_id)) == 1
        stored = await store.events([EventId(str(one.event_id)) for one in results])
        assert not any(event.soft_failed or event.rejected for event in stored.values())
        assert sorted(event.content["n"] for event in stored.values()) == list(range(40))


async def test_sends_and_appends_to_one_room_at_once(store: Store) -> None:
    room = RoomBuilder("11")
    room.start(room.user(1))
    await store.append(room.pdus)
    alice, room_id = room.user(1), room.room_id
    left = [room.message(alice, f"left {n}").pdu for n in range(10)]
    sends = [store.send(room_id, alice, "m.room.message", {"n": n}) for n in range(10)]
    appends = [store.append([pdu]) for pdu in left]
    mixed: list[Any] = [one for pair in zip(sends, appends, strict=True) for one in pair]
    await asyncio.gather(*mixed)
    last = await store.send(room_id, alice, "m.room.message", TEXT)
    assert await store.forward_extremities(room_id) == {last.event_id}


async def test_a_refused_event_is_not_stored(store: Store, dsn: str) -> None:
    room_id = await store.create_room(ALICE, initial_state=[PUBLIC])
    before = await row_counts(store.database)
    with pytest.raises(AuthDenied) as denied:
        await store.send(room_id, BOB, "m.room.message", TEXT)
    assert denied.value.rule == "sender.not_joined"
    assert await row_counts(store.database) == before


async def test_a_refused_first_event_makes_no_room(store: Store, dsn: str) -> None:
    before = await row_counts(store.database)
    with pytest.raises(AuthDenied):
        await store.create_room(
            ALICE,
            room_version="11",
            initial_state=[
                ("m.room.power_levels", "", {"users": {ALICE: 0}, "state_default": 50}),
                ("m.room.topic", "", {"topic": "one"}),
            ],
        )
    assert await row_counts(store.database) == before


@pytest.mark.parametrize("version", ["10", "12"])
async def test_a_user_redacts_own_events_and_a_moderator_others(store: Store, version: str) -> None:
    room_id = await store.create_room(ALICE, room_version=version, initial_state=[PUBLIC])
    await joined(store, room_id, BOB, CAROL)
    sent = await store.send(room_id, BOB, "m.room.message", TEXT)
    message = EventId(str(sent.event_id))
    with pytest.raises(AuthDenied, match=r"redaction\.not_own"):
        await store.send(room_id, CAROL, "m.room.redaction", {}, redacts=message)
    with pytest.raises(AuthDenied, match=r"redaction\.not_own"):
        await store.send(room_id, CAROL, "m.room.redaction", {}, redacts="$unknown:s1.test")
    await store.send(room_id, ALICE, "m.room.redaction", {}, redacts=message)
    event = await store.event(message)
    assert event is not None
    assert event.redacted_by is not None
    another = await store.create_room(ALICE, room_version=version, initial_state=[PUBLIC])
    await joined(store, another, BOB)
    for user in (ALICE, BOB):  # the sender of the event, and one with the power to redact
        for call in (store.send, store.template):
            with pytest.raises(AuthDenied, match=r"redaction\.of_other_room"):
                await call(another, user, "m.room.redaction", {}, redacts=message)


@pytest.mark.parametrize("version", ["2", "11", "12"])
async def test_a_template_becomes_an_event_of_another_server(store: Store, version: str) -> None:
    room_id = await store.create_room(ALICE, room_version=version, initial_state=[PUBLIC])
    made = await store.template(
        room_id, REMOTE, "m.room.member", {"membership": "join"}, state_key=REMOTE
    )
    assert "signatures" not in made
    pdu = sign(made, version, "s2.test", signing_key("s2.test"))
    [result] = await store.append([pdu], verify_keys=verify_keys(["s2.test"]))
    assert result.outcome == "stored"
    assert result.event_id == event_id(pdu, version)
    assert await store.forward_extremities(room_id) == {result.event_id}


async def test_a_refused_template_is_denied(store: Store) -> None:
    room_id = await store.create_room(ALICE)
    with pytest.raises(AuthDenied):
        await store.template(
            room_id, REMOTE, "m.room.member", {"membership": "join"}, state_key=REMOTE
        )


async def test_an_event_keeps_what_its_sender_chose(store: Store) -> None:
    room_id = await store.create_room(ALICE, content={"m.federate": False})
    sent = await store.send(room_id, ALICE, "test", {"a": [1, {"b": None}]}, timestamp_ms=1234)
    event = await store.event(EventId(str(sent.event_id)))
    assert event is not None
    assert (event.type, event.sender, event.content) == ("test", ALICE, {"a": [1, {"b": None}]})
    assert event.json["origin_server_ts"] == 1234
    create = await store.current_state(room_id)
    first = await store.event(create["m.room.create", ""])
    assert first is not None
    assert first.content["m.federate"] is False


async def test_bad_requests_raise_and_store_nothing(store: Store, dsn: str) -> None:
    room_id = await store.create_room(ALICE)
    before = await row_counts(store.database)
    with pytest.raises(InvalidIdentifier):
        await store.send(room_id, REMOTE, "m.room.message", TEXT)
    with pytest.raises(UnknownRoom):
        await store.send(RoomId("!unknown"), ALICE, "m.room.message", TEXT)
    with pytest.raises(InvalidEvent):
        await store.send(room_id, ALICE, "m.room.message", {"body": "x" * 66_000})
    with pytest.raises(InvalidEvent):
        await store.send(room_id, ALICE, "m.room.message", {"n": 1.5})
    with pytest.raises(InputError):
        await store.send(room_id, ALICE, "m.room.message", {"n": float("nan")})
    with pytest.raises(InputError):
        await store.send(room_id, ALICE, "m.room.create", {}, state_key="")
    with pytest.raises(InputError, match="needs redacts"):
        await store.send(room_id, ALICE, "m.room.redaction", {})
    with pytest.raises(UnknownRoom):
        await store.template(RoomId("!unknown"), ALICE, "m.room.message", TEXT)
    assert await row_counts(store.database) == before


WRONG: tuple[tuple[Any, str, str | None, int, str], ...] = (
    (1.5, "number", "content.x", 400, "M_BAD_JSON"),
    ({"list": [0, 2**53]}, "number", "content.x.list.1", 400, "M_BAD_JSON"),
    (-(2**64), "number", "content.x", 400, "M_BAD_JSON"),
    ([float("nan")], "number", "content.x.0", 400, "M_BAD_JSON"),
    ({"\ud800": 1}, "malformed", "content.x", 400, "M_BAD_JSON"),
    ("a\udfff", "malformed", "content.x", 400, "M_BAD_JSON"),
    ({1, 2}, "malformed", "content.x", 400, "M_BAD_JSON"),
    ("x" * 66_000, "too_large", None, 413, "M_TOO_LARGE"),
)


@pytest.mark.parametrize("version", ["6", "10", "12"])
@pytest.mark.parametrize("value,kind,key,status,errcode", WRONG, ids=range(len(WRONG)))
async def test_an_error_names_the_key_and_has_the_status_of_the_api(
    store: Store, version: str, value: Any, kind: str, key: str | None, status: int, errcode: str
) -> None:
    room_id = await store.create_room(ALICE, room_version=version)
    with pytest.raises(InvalidEvent) as caught:
        await store.send(room_id, ALICE, "m.room.message", {"ok": 0, "x": value})
    assert (caught.value.kind, caught.value.key) == (kind, key)
    assert str(caught.value).startswith(key or "")
    found, body = responses.error(caught.value)
    assert (found, body["errcode"]) == (status, errcode)


@pytest.mark.parametrize("version,status", [("9", None), ("10", 400), ("12", 400)])
async def test_levels_as_text_are_bad_json(store: Store, version: str, status: int | None) -> None:
    room_id = await store.create_room(ALICE, room_version=version)
    wrong: tuple[dict[str, Any], ...] = (
        {"users": {BOB: "50"}},
        {"ban": "50"},
        {"events": {"m.room.name": "0"}},
    )
    for levels in wrong:
        if status is None:
            text = {"users": {ALICE: "100"}} | levels
            await store.send(room_id, ALICE, "m.room.power_levels", text, state_key="")
            break
        with pytest.raises(AuthDenied) as caught:
            await store.send(room_id, ALICE, "m.room.power_levels", levels, state_key="")
        found, body = responses.error(caught.value)
        assert (found, body["errcode"]) == (status, "M_BAD_JSON")


async def test_rooms_and_states_that_are_not_here_have_a_status(store: Store) -> None:
    """A client that needs a membership may not know whether there is such a room."""
    room = RoomBuilder("11", seed=3)
    room.start("@user2:s2.test")
    [outlier] = await store.append([room.events[0].pdu], room_version="11", origin="outlier")
    assert outlier.event_id is not None
    with pytest.raises(StateUnknown) as unknown:
        await store.state_before(outlier.event_id)
    assert responses.error(unknown.value)[0] == 404
    assert responses.error(unknown.value)[1]["errcode"] == "M_NOT_FOUND"
    nowhere = RoomId("!none:s1.test")
    for call in (
        store.send(nowhere, ALICE, "m.room.message", TEXT),
        store.members(nowhere),
        store.messages(nowhere, ALICE),
        responses.room_state(store, ALICE, nowhere),
    ):
        with pytest.raises(UnknownRoom) as caught:
            await call
        for for_member, status, errcode in (
            (True, 403, "M_FORBIDDEN"),
            (False, 404, "M_NOT_FOUND"),
        ):
            found, body = responses.error(caught.value, for_member=for_member)
            assert (found, body["errcode"]) == (status, errcode)


@pytest.mark.parametrize("type_", [["m.room.message"], {}, None, "\0", b"m.room.message"])
async def test_a_type_that_is_no_text_is_refused(store: Store, type_: Any) -> None:
    room_id = await store.create_room(ALICE)
    for call in (store.send, store.template):
        with pytest.raises(InvalidIdentifier):
            await call(room_id, ALICE, type_, TEXT)


async def test_a_refusal_reads_as_a_sentence(store: Store) -> None:
    room_id = await store.create_room(ALICE, initial_state=[PUBLIC])
    for call in (store.send, store.template):
        with pytest.raises(AuthDenied) as denied:
            await call(room_id, BOB, "m.room.message", TEXT)
        assert str(denied.value) == f"sender {BOB} is not in the room (sender.not_joined)"


@pytest.mark.parametrize(
    "type_,key",
    [("m.room.topic", '""'), ("m.room.member", "the user id"), ("m.space.child", "the id of the")],
)
async def test_state_needs_its_key(store: Store, type_: str, key: str) -> None:
    room_id = await store.create_room(ALICE, initial_state=[PUBLIC])
    before = await store.forward_extremities(room_id)
    for call in (store.send, store.template):
        with pytest.raises(InputError, match=f"{type_} is a state event: give state_key, {key}"):
            await call(room_id, ALICE, type_, {"topic": "one", "membership": "join"})
    assert await store.forward_extremities(room_id) == before


async def test_without_a_key_nothing_is_sent(dsn: str) -> None:
    async with storage.open(dsn, server_name="s1.test") as store:
        with pytest.raises(InputError, match="signing key"):
            await store.create_room(ALICE)
        room_id = await store.create_room(ALICE, signing_key=signing_key("s1.test"))
        with pytest.raises(InputError, match="signing key"):
            await store.send(room_id, ALICE, "m.room.message", TEXT)


@pytest.mark.parametrize("key", ["key", [signing_key("s1.test")], b"", object()])
async def test_a_wrong_key_is_named(store: Store, dsn: str, key: Any) -> None:
    with pytest.raises(InputError, match=f"signing_key is a {type(key).__name__}"):
        await store.create_room(ALICE, signing_key=key)
    with pytest.raises(InputError, match="a signing key of signedjson is wanted"):
        async with storage.open(dsn, server_name="s1.test", signing_key=key):
            pass


@pytest.mark.parametrize("state", [("m.room.name", ""), {"type": "m.room.name"}, "m.room.name"])
async def test_a_wrong_initial_state_is_named(store: Store, state: Any) -> None:
    with pytest.raises(InputError, match="write "):
        await store.create_room(ALICE, initial_state=[state])


@pytest.mark.parametrize("name", ["", "https://s1.test", "s1.test ", "@a:s1.test", "x" * 300])
async def test_a_malformed_server_name_is_refused(dsn: str, name: str) -> None:
    with pytest.raises(InvalidIdentifier):
        async with storage.open(dsn, server_name=name):
            pass
    async with storage.open(dsn, server_name="localhost:8448"):
        pass


async def test_a_send_after_a_write_of_another_process_is_built_on_it(
    store: Store, dsn: str
) -> None:
    room_id = await store.create_room(ALICE, initial_state=[PUBLIC])
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(
            storage.open(dsn, instance_name="second", signing_key=signing_key("s1.test"))
        )
        for number in range(5):
            for one in (store, other):
                await one.send(room_id, ALICE, "m.room.message", {"n": number})
    assert len(await store.forward_extremities(room_id)) == 1
