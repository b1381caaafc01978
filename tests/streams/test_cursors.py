"""Cursors: durable, never back unless wanted, one for each name."""

import asyncio
from collections.abc import AsyncIterator

import pytest

import storage
from storage import Store
from storage.errors import InputError


@pytest.fixture
async def store(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name="s1.test") as opened:
        yield opened


async def test_a_cursor_begins_at_0_and_keeps_its_position(store: Store, dsn: str) -> None:
    assert await store.cursors.get("federation") == 0
    assert await store.cursors.set("federation", 7) == 7
    assert await store.cursors.get("push") == 0
    async with storage.open(dsn, server_name="s1.test", instance_name="second") as second:
        assert await second.cursors.get("federation") == 7


async def test_a_cursor_goes_back_only_if_it_is_rewound(store: Store) -> None:
    await store.cursors.set("federation", 7)
    assert await store.cursors.set("federation", 5) == 7
    assert await store.cursors.get("federation") == 7
    assert await store.cursors.set("federation", 5, rewind=True) == 5
    assert await store.cursors.get("federation") == 5
    assert await store.cursors.set("federation", 0, rewind=True) == 0


async def test_concurrent_calls_end_at_the_largest(store: Store) -> None:
    await asyncio.gather(*(store.cursors.set("push", number) for number in range(1, 40)))
    assert await store.cursors.get("push") == 39


async def test_the_largest_position_fits(store: Store) -> None:
    assert await store.cursors.set("push", 2**63 - 1) == 2**63 - 1


@pytest.mark.parametrize("name", ["", "x" * 256, "é" * 128])
async def test_a_name_has_1_to_255_bytes(store: Store, name: str) -> None:
    await store.cursors.set("x" * 255, 1)
    with pytest.raises(InputError, match="1 to 255 bytes"):
        await store.cursors.set(name, 1)
