"""Events that the auth rules allow and on which other servers fail: this server makes none."""

from collections.abc import AsyncIterator
from typing import Any, Final

import pytest

import storage
from storage import Store
from storage.errors import AuthDenied, InvalidEvent
from storage.testing import RoomBuilder, signing_key
from tests.maintenance.rooms import findings
from tests.persist.tables import row_counts

ALICE: Final = "@alice:s1.test"
BOB: Final = "@bob:s1.test"
MEMBER: Final = "m.room.member"
INVITE: Final = {"membership": "invite"}
SIGNED: Final = {"mxid": BOB, "token": "t", "signatures": {}}
NO_USERS: Final = ("", "bob", "@", "@bob", "@bob:", ":s1.test", "bob:s1.test", "#bob:s1.test",
                   "@" + "b" * 250 + ":s1.test", "@" + "é" * 125 + ":s1.test")  # fmt: skip
BAD_CONTENT: Final[tuple[dict[str, Any], ...]] = (
    {"membership": "join", "join_authorised_via_users_server": "bob"},
    {"membership": "join", "join_authorised_via_users_server": 5},
    {"membership": "invite", "join_authorised_via_users_server": "@bob"},
    {"membership": "leave", "third_party_invite": None},
    {"membership": "invite", "third_party_invite": {}},
    {"membership": "invite", "third_party_invite": {"signed": []}},
    {"membership": "invite", "third_party_invite": {"signed": {**SIGNED, "mxid": "bob"}}},
    {"membership": "invite", "third_party_invite": {"signed": {**SIGNED, "mxid": ALICE}}},
    {"membership": "invite", "third_party_invite": {"signed": {**SIGNED, "token": 1}}},
    {"membership": "invite", "third_party_invite": {"signed": {**SIGNED, "signatures": 1}}},
)
VERSIONS: Final = ["1", "5", "8", "12"]


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    key = signing_key("s1.test")
    async with storage.open(dsn, server_name="s1.test", signing_key=key) as opened:
        yield opened


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_member_that_is_no_user_is_refused(store: Store, version: str) -> None:
    room_id = await store.create_room(ALICE, room_version=version)
    before = await row_counts(store.database)
    for user in NO_USERS:
        for make in (store.send, store.template):
            with pytest.raises(InvalidEvent):
                await make(room_id, ALICE, MEMBER, INVITE, state_key=user)
        with pytest.raises(InvalidEvent):
            await store.create_room(
                ALICE, room_version=version, initial_state=[(MEMBER, user, INVITE)]
            )
    assert await row_counts(store.database) == before


@pytest.mark.parametrize("version", VERSIONS)
async def test_malformed_ids_in_the_content_are_refused(store: Store, version: str) -> None:
    room_id = await store.create_room(ALICE, room_version=version)
    before = await row_counts(store.database)
    for content in BAD_CONTENT:
        for make in (store.send, store.template):
            with pytest.raises(InvalidEvent):
                await make(room_id, ALICE, MEMBER, content, state_key=BOB)
    assert await row_counts(store.database) == before


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_state_key_that_names_another_user_is_refused(store: Store, version: str) -> None:
    room_id = await store.create_room(ALICE, room_version=version)
    before = await row_counts(store.database)
    for state_key in (BOB, "@", "@x", "@alice:s1.test "):
        for make in (store.send, store.template):
            with pytest.raises(AuthDenied, match="is not the sender"):
                await make(room_id, ALICE, "org.state", {}, state_key=state_key)
    assert await row_counts(store.database) == before
    await store.send(room_id, ALICE, "org.state", {}, state_key=ALICE)


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_type_or_state_key_of_more_than_255_bytes_is_refused(
    store: Store, version: str
) -> None:
    room_id = await store.create_room(ALICE, room_version=version)
    for kind, state_key in (("é" * 128, None), ("t", "é" * 128)):
        for make in (store.send, store.template):
            with pytest.raises(InvalidEvent, match="longer than 255 bytes"):
                await make(room_id, ALICE, kind, {}, state_key=state_key)


@pytest.mark.parametrize("version", VERSIONS)
async def test_from_another_server_the_auth_rules_decide(store: Store, version: str) -> None:
    """It is stored, and read, and passed on; the room goes on."""
    room = RoomBuilder(version, seed=1, sign=False, checked=False)
    room.start("@admin:s9.test", join_rule="public")
    room.join(ALICE)
    bad = [room.member("@admin:s9.test", user, "invite") for user in NO_USERS[:-2]]
    results = await store.append(room.pdus)
    assert {one.outcome for one in results} == {"stored"}
    sent = await store.send(room.room_id, ALICE, "m.room.message", {"body": "after"})
    assert sent.outcome == "stored"
    page = await store.messages(room.room_id, ALICE)
    events = await store.client_events(ALICE, page.chunk)
    assert {one["event_id"] for one in events} >= {one.event_id for one in bad[2:]}
    await store.sync(ALICE)
    await store.members(room.room_id)
    given = await store.backfill(room.room_id, [results[-1].event_id], 100)  # type: ignore[list-item]
    assert {one.event_id for one in given} >= {one.event_id for one in bad}
    assert await findings(store) == []
