"""An archive that release 0.2.0 exported is imported: the same events, bytes, states and pages.

`archive-0.2.0/rooms.ndjson` is what its `room-storage export` wrote of two signed rooms: one with
a ban, a redaction, a rejected event and a soft-failed one; one with forks, and events after a gap
with the state before them. `known.json` has what its store returned.
"""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

import storage
from storage.ids import UserId
from tests.cli.running import room_storage
from tests.maintenance.rooms import findings

ARCHIVE = Path(__file__).parent / "archive-0.2.0"
SERVER = "s1.test"
KNOWN: dict[str, dict[str, Any]] = json.loads((ARCHIVE / "known.json").read_text(encoding="utf-8"))


async def values_of(store: storage.Store, room_id: str) -> dict[str, Any]:
    """What `known.json` has of a room, as the store returns it."""
    known = KNOWN[room_id]
    events = await store.events(known["events"], redact=False)
    state = await store.current_state(room_id)
    pages = {
        user: await store.messages(room_id, UserId(user), limit=100) for user in known["pages"]
    }
    return {
        "room_version": events[next(iter(events))].room_version,
        "events": {
            event_id: [
                hashlib.sha256(event.raw).hexdigest(),
                event.rejected,
                event.soft_failed,
                event.redacted_by,
            ]
            for event_id, event in events.items()
        },
        "state": sorted([*key, event_id] for key, event_id in state.items()),
        "pages": {user: [event.event_id for event in page.chunk] for user, page in pages.items()},
        "extremities": sorted(await store.forward_extremities(room_id)),
    }


async def test_an_archive_of_0_2_0_is_imported(dsn: str) -> None:
    archive = str(ARCHIVE / "rooms.ndjson")
    done = room_storage("import", archive, "--json", "--dsn", dsn, "--server-name", SERVER)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    events = sum(len(room["events"]) for room in KNOWN.values())
    assert (told["lines"], told["rejects"]) == (events, 0)
    async with storage.open(dsn, server_name=SERVER) as store:
        for room_id, known in KNOWN.items():
            assert await values_of(store, room_id) == known
        assert await findings(store) == []


async def test_a_byte_that_differs_would_be_noticed(dsn: str) -> None:
    room_id, known = next(iter(KNOWN.items()))
    lines = (ARCHIVE / "rooms.ndjson").read_bytes().splitlines(keepends=True)
    changed = [line.replace(b'"depth":', b'"depth": ', 1) for line in lines]
    done = room_storage(
        "import", "-", "--dsn", dsn, "--server-name", SERVER, given=b"".join(changed)
    )
    assert done.returncode == 0, done.stderr
    async with storage.open(dsn, server_name=SERVER) as store:
        found = await values_of(store, room_id)
    assert found["events"].keys() == known["events"].keys()
    assert found["events"] != known["events"]


@pytest.mark.parametrize("outcome", [1, 2, 3])
def test_the_archive_has_each_outcome(outcome: int) -> None:
    """The column is of `known.json`: rejected, soft-failed, redacted."""
    assert any(event[outcome] for room in KNOWN.values() for event in room["events"].values())
