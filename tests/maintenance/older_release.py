"""Stores as an earlier release left them.

It read each event of a batch by the version of the batch's first create event.
"""

from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

import storage
from storage import Store
from storage.persist import receive
from storage.persist.model.results import AppendResult, Origin
from storage.persist.plan import event as plan_event
from tests.maintenance.rooms import SERVER


def versions_before(
    glanced: Sequence[Mapping[str, Any]],
    rooms: Sequence[str | None],
    known: Mapping[str, str],
    _: Mapping[str, str],
    given: str | None,
) -> list[str | None]:
    own = {
        index: receive._claimed_version(one) if one.get("type") == "m.room.create" else None
        for index, one in enumerate(glanced)
    }
    created: dict[str, str] = {}
    for index, version in own.items():
        if version is not None and rooms[index] is not None:
            created.setdefault(rooms[index] or "", version)
    fallback = given or next((version for version in own.values() if version is not None), None)
    return [
        known.get(room or "") or own[index] or created.get(room or "") or fallback
        for index, room in enumerate(rooms)
    ]


@contextmanager
def earlier_release() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(receive, "versions", versions_before)
        patch.setattr(plan_event, "_unfit", lambda *_: None)
        yield


async def append_before(
    dsn: str, pdus: Sequence[bytes], *, origin: Origin = "live", room_version: str | None = None
) -> list[AppendResult]:
    """Append as the earlier release did, in a process that ends after it."""
    with earlier_release():
        async with opened(dsn) as store:
            return await store.append(pdus, origin=origin, room_version=room_version)


@asynccontextmanager
async def opened(dsn: str) -> AsyncIterator[Store]:
    async with storage.open(dsn, server_name=SERVER) as store:
        yield store
