"""The signing key was replaced: own old events still count, and the old key is listed."""

import time
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest
from signedjson.key import encode_verify_key_base64, generate_signing_key
from signedjson.types import SigningKey

import storage
from storage import InputError
from storage.federation import published_keys
from storage.federation.keys import read_server_keys
from storage.ids import ServerName
from storage.testing import KEY_ID, signing_key, verify_key
from tests.federation.peers import QUICK, Homeserver, Json
from tests.federation.rooms import agree, shared_room

S2: Final = ServerName("s2.test")
OLD: Final = encode_verify_key_base64(verify_key(S2))


def replaced(expired_ts: Any) -> dict[str, Json]:
    return {KEY_ID: {"key": OLD, "expired_ts": expired_ts}}


async def rejoined(
    stack: AsyncExitStack,
    servers: list[Homeserver],
    dsn: str,
    version: str,
    old: dict[str, Json] | None,
) -> tuple[Homeserver, storage.RoomId, storage.federation.JoinResult]:
    """Join a room with the second server again, on an empty database and with another key."""
    one, other = servers
    room_id = await shared_room(one, other, version=version)
    key: SigningKey = generate_signing_key("new")
    store = await stack.enter_async_context(
        storage.open(dsn, server_name=S2, signing_key=key, old_signing_keys=old)
    )

    async def keys(_: Json) -> Json:
        return published_keys(S2, key, old_signing_keys=replaced(now_ms()))

    one.network.faults[S2, "server_keys"] = keys
    one.network.servers[S2] = again = Homeserver(one.network, S2, store, QUICK)
    joined = await again.memberships.join(again.user("guest"), room_id, [one.name])
    return again, room_id, joined


def now_ms() -> int:
    return time.time_ns() // 1_000_000


@pytest.mark.parametrize("version", ["1", "4", "5", "11", "12"])
async def test_own_old_events_count_when_a_room_is_joined_again(
    two: list[Homeserver], third_dsn: str, version: str
) -> None:
    async with AsyncExitStack() as stack:
        old = replaced(now_ms() + 3_600_000)
        again, room_id, joined = await rejoined(stack, two, third_dsn, version, old)
        assert joined.outcome == "joined"
        assert joined.left_out == {}
        state = await again.store.current_state(room_id)
        assert ("m.room.member", again.user()) in state
        await agree(room_id, two[0], again)


@pytest.mark.parametrize("old", [None, replaced(1)])
async def test_without_the_old_key_or_after_its_end_they_are_left_out(
    two: list[Homeserver], third_dsn: str, old: dict[str, Json] | None
) -> None:
    async with AsyncExitStack() as stack:
        again, room_id, joined = await rejoined(stack, two, third_dsn, "12", old)
        [reason] = joined.left_out.values()
        assert "s2.test" in reason
        assert ("m.room.member", again.user()) not in await again.store.current_state(room_id)


def test_old_keys_are_published() -> None:
    body = published_keys(S2, generate_signing_key("new"), old_signing_keys=replaced(7))
    assert body["old_verify_keys"] == replaced(7)
    found = read_server_keys(S2, body, now_ms())
    assert found[KEY_ID] == (verify_key(S2), 7)
    assert set(found) == {KEY_ID, "ed25519:new"}


@pytest.mark.parametrize(
    "old",
    [
        [KEY_ID],
        "ed25519:1",
        {KEY_ID: OLD},
        {KEY_ID: {"key": OLD}},
        {KEY_ID: {"expired_ts": 5}},
        {KEY_ID: {"key": OLD, "expired_ts": "5"}},
        {KEY_ID: {"key": OLD, "expired_ts": -1}},
        {KEY_ID: {"key": OLD, "expired_ts": True}},
        {KEY_ID: {"key": b"key", "expired_ts": 5}},
        {KEY_ID: {"key": "no key", "expired_ts": 5}},
        {KEY_ID: {"key": "\ud800", "expired_ts": 5}},
        {"rsa:1": {"key": OLD, "expired_ts": 5}},
        {7: {"key": OLD, "expired_ts": 5}},
    ],
)
async def test_malformed_old_keys_are_refused(old: Any) -> None:
    key = generate_signing_key("new")
    with pytest.raises(InputError):
        published_keys(S2, key, old_signing_keys=old)
    with pytest.raises(InputError):
        async with storage.open("dbname=none", signing_key=key, old_signing_keys=old):
            pass


async def test_a_key_is_either_current_or_old() -> None:
    for key in (signing_key(S2), None):
        with pytest.raises(InputError, match="old_signing_keys"):
            async with storage.open("dbname=none", signing_key=key, old_signing_keys=replaced(5)):
                pass
