"""Events for clients, here and in Synapse: the same rooms with forks, for each local reader.

Synapse runs as a process with its own storage, filter and serializer, and receives the events as
from other servers. STORAGE_EXAMPLES=20 compares 20 rooms, about 20,000 pairs of event and reader.
"""

import json
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
import pytest_asyncio

import storage
from benchmarks.peers.process import SynapseProcess, synapse_on_sqlite
from storage import Store
from storage.ids import EventId
from storage.testing import SHAPES, GeneratedRoom, generate_room
from storage.testing.world import Odd, Shape
from tests.homeserver import environment

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

SEEDS: Final = int(os.environ.get("STORAGE_EXAMPLES", "2"))
VERSIONS: Final = ("11", "12", "10", "6", "3")
EVENTS: Final = 120
BASE: Final = 6  # until the room has a member here: stored without authorisation
VISIBILITIES: Final = ("shared", "joined", "invited", "world_readable")
SHAPE: Final = SHAPES["fork_heavy"].replaced(servers=3, members=8)
SHAPES_OF_SEEDS: Final[tuple[Shape, ...]] = tuple(
    SHAPE.replaced(
        mix={**SHAPE.mix, "redaction": 6, "edit": 8, "thread": 10, "profile": 12},
        history_visibility=visibility,
        odd=Odd(soft_failed=0.01, rejected=0.02),
    )
    for visibility in VISIBILITIES
)
STRANGER: Final = "@stranger:s1.test"
Shown = dict[str, Any]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def peer(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SynapseProcess]:
    python = environment.interpreter()
    if python is None:
        pytest.skip(f"there is no environment with Synapse in {environment.folder()}")
    folder: Path = tmp_path_factory.mktemp("peer")
    async with synapse_on_sqlite(python, folder, "s1.test") as started:
        yield started


@pytest.mark.timeout(300 + 30 * SEEDS)
async def test_events_are_those_of_synapse(dsn: str, peer: SynapseProcess) -> None:
    seen: Counter[str] = Counter()
    for seed in range(SEEDS):
        shape, version = SHAPES_OF_SEEDS[seed % 4], VERSIONS[seed % len(VERSIONS)]
        room = generate_room(shape, EVENTS, seed=1_000 + seed, version=version)
        await receive(peer, room)
        async with storage.open(dsn, server_name="s1.test") as store:
            await compare_room(store, peer, room, seen)
    assert seen["pairs"] > 400 * SEEDS, seen
    assert seen["membership"] == seen["pairs"] > 10 * seen["differ"], seen
    for field in ("prev_content", "redacted_because", "m.relations", "not join"):
        assert seen[field] > 5 * SEEDS, seen


async def compare_room(
    store: Store, peer: SynapseProcess, room: GeneratedRoom, seen: Counter[str]
) -> None:
    results = await store.append([event.pdu for event in room], room_version=room.room_version)
    assert {one.outcome for one in results} <= {"stored", "soft_failed", "rejected"}
    ids = [EventId(str(one.event_id)) for one in results]
    senders = {json.loads(event.pdu)["sender"] for event in room}
    for reader in (*sorted(one for one in senders if one.endswith(":s1.test")), STRANGER):
        await compare(store, peer, reader, ids, seen)


async def receive(peer: SynapseProcess, room: GeneratedRoom) -> None:
    pdus = [event.pdu for event in room]
    await peer.ask("room", room_id=room.room_id, room_version=room.room_version)
    for how, part in (("single", pdus[:BASE]), ("receive", pdus[BASE:])):
        await peer.load([[[pdu] for pdu in part]])
        await peer.ask("persist", how=how)


async def compare(
    store: Store, peer: SynapseProcess, reader: str, ids: list[EventId], seen: Counter[str]
) -> None:
    """Compare the events that both return. Which these are is the subject of other tests.

    Synapse's filter needs to know from each endpoint whether the reader has left.
    """
    answer = await peer.ask("client_events", user_id=reader, event_ids=ids)
    stored = await store.events(ids)
    found = await store.client_events(reader, [stored[one] for one in ids])
    theirs = {one["event_id"]: one for one in answer["events"]}
    visible = await store.visible_to_user(reader, ids)
    hidden = {
        json.loads(event.raw)["content"].get("m.relates_to", {}).get("event_id")
        for event_id, event in stored.items()
        if event_id not in visible
    }
    for ours in found:
        if ours["event_id"] in theirs:
            note(ours, seen)
            other = theirs[ours["event_id"]]
            problems = [
                problem
                for problem in difference(comparable(other), comparable(ours))
                if not explained(problem, ours, reader, visible, hidden, other)
            ]
            assert problems == [], json.dumps([reader, problems, other, ours])
            seen["differ"] += comparable(other) != comparable(ours)


def note(event: Shown, seen: Counter[str]) -> None:
    """Count what the events have, so that the comparison is known not to be empty."""
    seen["pairs"] += 1
    seen.update(event["unsigned"].keys())
    seen["not join"] += event["unsigned"]["membership"] != "join"


def comparable(event: Shown) -> Shown:
    """Return an event without the fields that only one of them has.

    Synapse adds `redacted_by`, which is not specified, and `age` only where the sender claims one.
    It has no `membership` in the events within `unsigned`.
    """
    copy: Shown = json.loads(json.dumps(event))
    for inner, is_outer in _events_in(copy, is_outer=True):
        for key in ("age", "redacted_by", *(() if is_outer else ("membership",))):
            inner["unsigned"].pop(key, None)
    return copy


def _events_in(value: Any, *, is_outer: bool) -> Iterator[tuple[Shown, bool]]:
    if isinstance(value, dict):
        if "unsigned" in value:
            yield value, is_outer
            is_outer = False
        for one in value.values():
            yield from _events_in(one, is_outer=is_outer)


def difference(theirs: Any, ours: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of the values that differ."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in theirs.keys() | ours.keys():
            yield from difference(theirs.get(key), ours.get(key), f"{path}/{key}")
    elif theirs != ours:
        yield path


def explained(
    path: str,
    ours: Shown,
    reader: str,
    visible: set[EventId],
    hidden: set[str],
    theirs: Mapping[str, Any],
) -> bool:
    """Return whether a difference has a reason.

    Synapse returns what the reader may not see: previous content, the reason of a redaction, and
    relations. `hidden` are the events that have such relations. Of several redactions it has any.
    """
    _, _, field, *rest = path.split("/")
    other = theirs["unsigned"]
    if field in ("prev_content", "prev_sender", "replaces_state"):
        was_there = ours["unsigned"]["membership"] == "join" or ours.get("state_key") == reader
        return other["replaces_state"] not in visible and not was_there
    if field == "redacted_because":
        is_another = other[field]["event_id"] != ours["unsigned"][field]["event_id"]
        if is_another:  # of several redactions
            return bool(other[field]["redacts"] == ours["event_id"])
        return rest == ["content", "reason"] and other[field]["event_id"] not in visible
    latest = other[field].get("m.thread", {}).get("latest_event", {}).get("event_id")
    return field == "m.relations" and bool({latest, ours["event_id"]} & hidden)
