"""Backfill: request the history before a room's gaps, with the state before its lowest event."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from storage.federation.gap import Results, connected, store_connected
from storage.federation.remote import RemoteError
from storage.federation.room_task import RoomTask
from storage.ids import EventId, ServerName
from storage.queries.gaps import OpenGap

GAPS_MAX = 20
"""Gaps of one request, the latest ones first."""


@dataclass(frozen=True, slots=True)
class BackfillResult:
    """The outcome of a backfill.

    ``outcome``:

    - ``stored``: ``results`` has what arrived; call again for more
    - ``nothing_missing``: the room has no gap
    - ``paused``: requests for all gaps failed lately; call again after ``retry_after_ms``
    - ``failed``: no server returned an event that could be stored; ``failures`` says why, by server
    """

    outcome: Literal["stored", "nothing_missing", "paused", "failed"]
    results: Results = field(default_factory=dict)
    failures: Mapping[ServerName, str] = field(default_factory=dict)
    retry_after_ms: int = 0

    @property
    def stored(self) -> int:
        """Return the number of events that are new."""
        return sum(one.is_stored and one.outcome != "duplicate" for one in self.results.values())


async def backfill_room(task: RoomTask, limit: int) -> BackfillResult:
    """Fill the latest gaps of a room with at most ``limit`` events. `UnknownRoom`."""
    gaps = await task.store.gaps(task.room_id)
    if not gaps:
        return BackfillResult("nothing_missing")
    due = [one for one in gaps if one.retry_after_ms == 0][:GAPS_MAX]
    if not due:
        return BackfillResult("paused", retry_after_ms=min(one.retry_after_ms for one in gaps))
    servers = await task.servers()
    for server in servers:
        results = await _from_server(task, server, servers, due, limit)
        if any(one.is_stored for one in results.values()):
            return BackfillResult("stored", results, task.requests.failures)
    await _record_failure(task, servers, [gap.event_id for gap in due])
    return BackfillResult("failed", {}, task.requests.failures)


async def _from_server(
    task: RoomTask,
    server: ServerName,
    servers: Sequence[ServerName],
    gaps: Sequence[OpenGap],
    limit: int,
) -> Results:
    ids = [gap.event_id for gap in gaps]
    try:
        pdus = await task.requests.backfill(server, task.room_id, ids, limit)
    except RemoteError:  # recorded in task.requests.failures
        return {}
    events = connected((await task.read(pdus)).events, ids)
    if not events:
        task.requests.failures.setdefault(server, "it returned none of the missing events")
        return {}
    others = [server, *(one for one in servers if one != server)]
    results = await store_connected(
        task, others, events, fallback=events.keys() & set(ids), origin="backfill"
    )
    lacking = [one for one in ids if one not in results or not results[one].is_stored]
    if lacking and len(pdus) < limit:
        await _record_failure(task, [server], lacking)
    return results


async def _record_failure(
    task: RoomTask, servers: Sequence[ServerName], event_ids: Sequence[EventId]
) -> None:
    await task.store.gap_failed(
        task.room_id, event_ids, task.requests.reason(), server_names=servers
    )
