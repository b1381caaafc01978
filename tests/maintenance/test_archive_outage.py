"""A store of the archive that hangs: reads end with an error, and everything else goes on.

The file of a pack is replaced by a named pipe, whose opening blocks until somebody writes.
"""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

import storage
from storage import ArchiveUnavailable, Config, Store
from storage.database import archived_bytes
from storage.testing import RoomBuilder
from tests.maintenance.archived import (
    USER,
    archive,
    files,
    raw_bytes,
    raw_of,
    references,
    said_and_archived,
)
from tests.maintenance.rooms import SERVER

POOL: int = 6
PATIENT_MS: int = 60_000


class StoppedClock:
    """The time of `archive_limits`, which goes on where a test says so."""

    def __init__(self) -> None:
        self.now = 1_000.0

    def monotonic(self) -> float:
        return self.now

    def go_on(self, _: object) -> None:
        self.now += 1


@pytest.fixture
async def store(dsn: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Store]:
    monkeypatch.setattr(archived_bytes, "PAUSE_S", 0)
    config = Config(pool_size_max=POOL, archive_timeout_ms=PATIENT_MS, prepare_ahead=False)
    async with storage.open(dsn, server_name=SERVER, config=config) as opened:
        yield opened


@contextmanager
def hanging(store: Store, folder: str, timeout_ms: int = 300) -> Iterator[Path]:
    """The store of a folder does not answer during a block: one file is in its place.

    Only then the limits are short, because a busy machine exceeds them.
    """
    paths = files(folder)
    kept = {path: path.read_bytes() for path in paths}
    for path in paths:
        path.unlink()
        os.mkfifo(path)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(archived_bytes, "SLOW_MS", 100)
            patch.setattr(store.database._connect._limits, "_timeout_ms", timeout_ms)
            yield paths[0]
    finally:
        for path, data in kept.items():
            answer(path)
            path.unlink()
            path.write_bytes(data)


def answer(pipe: Path) -> None:
    """Let all threads go on that wait for a pipe: they get an error."""
    with suppress(OSError):  # nobody reads it
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))


async def outcome(store: Store, event_id: str) -> str:
    """The bytes of an event were read, or why not."""
    try:
        await raw_of(store, event_id)
    except ArchiveUnavailable as error:
        return error.reason
    return "read"


@pytest.fixture
async def archived(store: Store, folder: str) -> list[str]:
    """The ids of archived events in one pack; its URL is known to all connections."""
    await said_and_archived(store, folder)
    await archive(store, folder)
    found = await references(store)
    await asyncio.gather(*(raw_bytes(store) for _ in range(POOL)))
    return list(found)


async def test_half_of_the_connections_wait(
    store: Store, archived: list[str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of many reads at once, half of the connections wait on; writes and other reads go on."""
    clock = StoppedClock()
    monkeypatch.setattr(archived_bytes, "time", clock)
    with hanging(store, folder, PATIENT_MS):
        reads = [asyncio.create_task(outcome(store, event_id)) for event_id in archived[:20]]
        for one in reads:  # once the first has ended, the time of others is over
            one.add_done_callback(clock.go_on)
        room = RoomBuilder("11", seed=1)
        room.start(USER)
        await store.append(room.pdus)
        assert len(await store.current_state(room.room_id)) > 3
        ended = asyncio.as_completed(reads)
        reasons = {await next(ended) for _ in reads[POOL // 2 :]}
        assert reasons == {"no answer within 100 ms", "too many reads wait for it"}
        assert sum(not one.done() for one in reads) == POOL // 2
    await asyncio.gather(*reads)
    assert await outcome(store, archived[0]) == "read"


async def test_reads_fail_at_once_during_an_outage(
    store: Store,
    archived: list[str],
    folder: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(archived_bytes, "PAUSE_S", 3_600)
    with hanging(store, folder):
        assert await outcome(store, archived[0]) == "no answer within 300 ms"
        for event_id in archived[:20]:
            assert await outcome(store, event_id) == "it did not answer a moment ago"
        monkeypatch.setattr(archived_bytes, "PAUSE_S", 0)
        state = store.database._connect._limits._folders
        [resting] = state.values()
        resting._rests_until = 0.0  # the pause is over: one read tries it for all
        with monkeypatch.context() as patch:  # all come before the end of the first
            patch.setattr(archived_bytes, "time", StoppedClock())
            patch.setattr(archived_bytes, "SLOW_MS", 0)
            found = Counter(await asyncio.gather(*(outcome(store, one) for one in archived[:4])))
        assert found == {"no answer within 300 ms": 1, "it did not answer a moment ago": 3}
        assert await outcome(store, archived[0]) == "no answer within 300 ms"
    assert await outcome(store, archived[0]) == "read"
    assert {await outcome(store, one) for one in archived} == {"read"}
    logged = [one.message for one in caplog.records if one.name == archived_bytes.__name__]
    assert len(logged) == 2
    assert "no answer within 300 ms" in logged[0]
    assert "is back after" in logged[1]


async def test_an_error_without_a_wait_is_no_outage(
    store: Store, archived: list[str], folder: str
) -> None:
    """A folder that is not there is reported at once, so nobody has to be spared."""
    Path(folder).rename(folder + ".moved")
    for event_id in archived[:3]:
        assert await outcome(store, event_id) == "the folder is not there"
    Path(folder + ".moved").rename(folder)
    assert await outcome(store, archived[0]) == "read"
