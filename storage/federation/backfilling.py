"""Backfill: request the history before a room's gaps, with the state before its lowest event."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from storage.federation.gap import Results, connected, in_timeline, store_connected
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


async def backfill_room(
    task: RoomTask,
    limit: int,
    *,
    only: Collection[EventId] | None = None,
    first: Sequence[ServerName] = (),
) -> BackfillResult:
    """Fill the latest gaps of a room with at most ``limit`` events. `UnknownRoom`.

    ``only`` these missing events are requested, of the servers ``first`` before others.
    """
    gaps = await task.store.gaps(task.room_id)
    if only is not None:
        gaps = [one for one in gaps if one.event_id in only]
    if not gaps:
        return BackfillResult("nothing_missing")
    due = [one for one in gaps if one.retry_after_ms == 0][:GAPS_MAX]
    if not due:
        return BackfillResult("paused", retry_after_ms=min(one.retry_after_ms for one in gaps))
    servers = await task.servers(*first)
    results, asked = await _from_servers(task, servers, due, limit)
    lacking = _lacking([gap.event_id for gap in due], results)
    if lacking and asked.is_complete:
        await task.store.gap_failed(
            task.room_id, lacking, task.requests.reason(), server_names=asked.servers
        )
    if any(one.is_stored for one in results.values()):
        return BackfillResult("stored", results, task.requests.failures)
    return BackfillResult("failed", results, task.requests.failures)


class AskedServers(NamedTuple):
    """The servers that were asked for history.

    ``is_complete``: no answer was cut off by the limit, so what is lacking was not returned.
    """

    servers: list[ServerName]
    is_complete: bool


async def _from_servers(
    task: RoomTask, servers: Sequence[ServerName], gaps: Sequence[OpenGap], limit: int
) -> tuple[Results, AskedServers]:
    """Ask one server after the other, until each of the missing events is stored."""
    ids = [gap.event_id for gap in gaps]
    results: Results = {}
    asked = AskedServers([], is_complete=True)
    for server in servers:
        lacking = _lacking(ids, results)
        if not lacking:
            break
        asked.servers.append(server)
        others = [server, *(one for one in servers if one != server)]
        found, is_cut = await _from_server(task, others, lacking, limit)
        results |= found
        asked = asked._replace(is_complete=asked.is_complete and not is_cut)
    return results, asked


def _lacking(ids: Sequence[EventId], results: Results) -> list[EventId]:
    return [one for one in ids if one not in results or not results[one].is_stored]


async def _from_server(
    task: RoomTask, servers: Sequence[ServerName], ids: Sequence[EventId], limit: int
) -> tuple[Results, bool]:
    """Store what the first server returns; return the results, and whether it reached the limit.

    Events below a stored one belong to another gap, or to the time before this server's join.
    The other servers may be asked for states.
    """
    server = servers[0]
    try:
        pdus = await task.requests.backfill(server, task.room_id, ids, limit)
    except RemoteError:  # recorded in task.requests.failures
        return {}, False
    read = (await task.read(pdus)).events
    stored = await in_timeline(task, read)
    events = connected({one: event for one, event in read.items() if one not in stored}, ids)
    if not events:
        task.requests.failures.setdefault(server, "it returned none of the missing events")
        return {}, False
    fallback = events.keys() & set(ids)
    results = await store_connected(task, servers, events, fallback=fallback, origin="backfill")
    return results, len(pdus) >= limit
