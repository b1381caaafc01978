"""The argument of `append`: a list of PDUs, each bytes or a dict.

Another argument is an `InputError`, another element is ``invalid``.
"""

import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

import storage
from storage import InputError, Store
from storage.testing import RoomBuilder


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test") as opened:
        yield opened


def room_of(version: str = "11") -> RoomBuilder:
    room = RoomBuilder(version, sign=False)
    room.start(room.user(1))
    return room


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, str, dict])
async def test_a_single_pdu_is_no_list(store: Store, kind: type) -> None:
    event = room_of().events[0]
    pdu = event.pdu.decode() if kind is str else event.json if kind is dict else event.pdu
    said = f"pdus is a single {kind.__name__}: a list is wanted, write [pdu]"
    with pytest.raises(InputError, match=f"^{re.escape(said)}$"):
        await store.append(kind(pdu))
    assert await store.event(event.event_id) is None


@pytest.mark.parametrize("value", [None, 7, object()])
async def test_what_is_no_list(store: Store, value: Any) -> None:
    with pytest.raises(InputError, match=r"^pdus is .*: a list is wanted$"):
        await store.append(value)


@pytest.mark.parametrize("version", [11, b"11", ["11"]])
async def test_a_room_version_is_text(store: Store, version: Any) -> None:
    with pytest.raises(InputError, match=r"^room_version is .*: a str is wanted$"):
        await store.append(room_of().pdus, room_version=version)


@pytest.mark.parametrize(
    "keys,said",
    [
        ("key", "verify_keys is a str: a mapping or an async function is wanted"),
        ([b"key"], "verify_keys is a list: a mapping or an async function is wanted"),
        ({"s1.test": {"ed25519:1": "key"}}, "verify_keys has 's1.test': pairs are wanted"),
    ],
)
async def test_keys_are_by_server_and_key_id(store: Store, keys: Any, said: str) -> None:
    with pytest.raises(InputError, match=said):
        await store.append(room_of().pdus, verify_keys=keys)


@pytest.mark.parametrize("given", [None, "11"])
@pytest.mark.parametrize("origin", ["live", "outlier"])
async def test_an_element_that_is_no_pdu_is_invalid(
    store: Store, given: str | None, origin: Any
) -> None:
    """The others are stored."""
    room = room_of()
    text = room.pdus[0].decode()
    bad: list[Any] = [None, 7, 7.5, True, "", text, [room.pdus[0]], (1,), object, iter(()), {1, 2}]
    results = await store.append([*bad, *room.pdus, *bad], room_version=given, origin=origin)
    assert [result.outcome for result in results] == ["invalid"] * len(bad) + ["stored"] * len(
        room.pdus
    ) + ["invalid"] * len(bad)
    reasons = [result.reason for result in results if result.outcome == "invalid"]
    assert reasons[:2] == [
        "a PDU is bytes or a dict, not NoneType",
        "a PDU is bytes or a dict, not int",
    ]
    assert reasons[5] == "a PDU is bytes or a dict, not str: write pdu.encode()"
    assert {result.event_id for result in results if result.outcome == "invalid"} == {None}


@pytest.mark.parametrize(
    "bad",
    [
        {},
        {1: 2},
        {"type": object()},
        {"depth": float("nan")},
        {"content": {"a": {1}}},
        {"\ud800": 1},
    ],
)
async def test_a_dict_that_is_no_pdu_is_invalid(store: Store, bad: dict[Any, Any]) -> None:
    room = room_of()
    results = await store.append([bad, *room.pdus], room_version="11")
    assert [result.outcome for result in results] == ["invalid"] + ["stored"] * len(room.pdus)


@pytest.mark.parametrize("kind", [tuple, iter])
async def test_any_collection_will_do(store: Store, kind: Any) -> None:
    room = room_of()
    assert {result.outcome for result in await store.append(kind(room.pdus))} == {"stored"}
