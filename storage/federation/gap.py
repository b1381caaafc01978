"""Fill the gap before events whose parents are not stored.

1. Request the events in between, backwards from the new ones, in a few rounds.
2. Store them with the new events, parents first.
3. If a parent is still missing, request the state before the lowest event that lacks one. If that
   fails, request the state before the new events themselves.
4. If an auth event is missing, request the auth chain of the event that cites it.

Each step keeps what it has. An event whose gap stays open remains `missing_parents`.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple

from storage.errors import UnknownRoom
from storage.event import Event
from storage.federation.joining import state_before
from storage.federation.remote import RemoteError
from storage.federation.room_task import RoomTask
from storage.ids import EventId, ServerName
from storage.persist import AppendResult, Origin
from storage.persist.receive import in_order
from storage.queries.federation import latest_ids
from storage.queries.gaps import OpenGap

Results = dict[EventId, AppendResult]
EXTREMITIES_MAX: Final = 20
LATEST_MAX: Final = 100


async def fill_gap(
    task: RoomTask, servers: Sequence[ServerName], waiting: Mapping[EventId, Event]
) -> Results:
    """Store events whose parents are missing; return the results of these events by id."""
    between = await _events_between(task, servers, waiting)
    results = await store_connected(task, servers, {**between, **waiting}, fallback=waiting)
    return {event_id: _explained(task, results[event_id]) for event_id in waiting}


def _explained(task: RoomTask, result: AppendResult) -> AppendResult:
    if result.outcome != "missing_parents":
        return result
    return result._replace(reason=f"{result.reason}; {task.requests.reason()}")


# ------------------------------------------------------------------------------------------------
# events in between


async def _events_between(
    task: RoomTask, servers: Sequence[ServerName], waiting: Mapping[EventId, Event]
) -> dict[EventId, Event]:
    """Return events before the waiting ones, as far as a few requests reach."""
    earliest = await _earliest(task)
    between: dict[EventId, Event] = {}
    for _ in range(task.limits.missing_rounds_max):
        candidates = {**waiting, **between}
        lacking = await _missing_parents(task, candidates)
        latest = [
            event_id
            for event_id, event in candidates.items()
            if lacking.intersection(event.prev_event_ids)
        ]
        new = await _round(task, servers, earliest, latest, lacking) if latest else {}
        if not new:
            break
        between.update(new)
    return between


async def _earliest(task: RoomTask) -> list[EventId]:
    """Return stored events at which the walk of the other server stops.

    It may not know the forward extremities yet. Without the events before them, it would return
    these in place of missing ones.
    """
    try:
        extremities = sorted(await task.store.forward_extremities(task.room_id))[:EXTREMITIES_MAX]
    except UnknownRoom:
        return []
    async with task.store.database.connection() as conn:
        latest = await latest_ids(conn, task.room_id, LATEST_MAX)
    return list(dict.fromkeys([*extremities, *latest]))


async def _missing_parents(task: RoomTask, events: Mapping[EventId, Event]) -> set[EventId]:
    """Return the parents of these events that are neither among them nor in the timeline."""
    parents = {
        parent_id for event in events.values() for parent_id in event.prev_event_ids
    } - events.keys()
    return parents - await in_timeline(task, parents)


async def in_timeline(task: RoomTask, event_ids: Iterable[EventId]) -> set[EventId]:
    stored = await task.stored(event_ids)
    return {
        event_id
        for event_id, key in stored.items()
        if not key.outlier and key.room_id == task.room_id
    }


async def _round(
    task: RoomTask,
    servers: Sequence[ServerName],
    earliest: Sequence[EventId],
    latest: Sequence[EventId],
    lacking: Iterable[EventId],
) -> dict[EventId, Event]:
    """Return what the first server that has something returns, as far as the stored timeline.

    On a fork, ``earliest`` does not bound the walk of the other server. It may then return history
    from before this server's join, which must not be stored as new events.
    """
    for server in servers:
        try:
            pdus = await task.requests.missing_events(server, task.room_id, earliest, latest)
        except RemoteError:  # recorded in task.requests.failures
            continue
        events = (await task.read(pdus)).events
        stored = await in_timeline(task, events)
        new = {event_id: event for event_id, event in events.items() if event_id not in stored}
        reached = connected(new, lacking)
        if reached:
            return reached
    return {}


def connected(events: Mapping[EventId, Event], first: Iterable[EventId]) -> dict[EventId, Event]:
    """Return the events that are reached from these ids over prev_events; drop the others.

    They stay in their order, so that it does not follow from that of a set.
    """
    reached: set[EventId] = set()
    queue = list(first)
    while queue:
        event_id = queue.pop()
        if event_id in events and event_id not in reached:
            reached.add(event_id)
            queue.extend(events[event_id].prev_event_ids)
    return {event_id: event for event_id, event in events.items() if event_id in reached}


# ------------------------------------------------------------------------------------------------
# storing, with states and auth chains for what lacks them


async def store_connected(
    task: RoomTask,
    servers: Sequence[ServerName],
    events: Mapping[EventId, Event],
    *,
    fallback: Iterable[EventId] = (),
    origin: Origin = "live",
) -> Results:
    """Store events of one room, and fetch the state before those that lack parents.

    ``fallback``: where the state before the lowest event cannot be had, only these are tried.
    """
    ordered = [list(events.values())[index] for index in in_order(list(events.values()))]
    results = await task.append(ordered, origin=origin)
    states: dict[EventId, tuple[EventId, ...]] = {}
    tried: set[EventId] = set()
    only: frozenset[EventId] | None = None
    for _ in range(task.limits.states_max):
        event = _lowest_blocked(ordered, results, tried, only)
        if event is None:
            break
        tried.add(event.event_id)
        if not await _provide(task, servers, event, results[event.event_id], states):
            only = frozenset(fallback)
            continue
        again = [event for event in ordered if results[event.event_id].outcome == "missing_parents"]
        results.update(await task.append(again, origin=origin, state_before=states))
    return results


def _lowest_blocked(
    ordered: Iterable[Event],
    results: Results,
    tried: set[EventId],
    only: frozenset[EventId] | None,
) -> Event | None:
    """Return the first event that lacks something outside of the batch, or of a part of it."""
    open_ = {
        event_id for event_id, result in results.items() if result.outcome == "missing_parents"
    }
    for event in ordered:
        if event.event_id not in open_ or event.event_id in tried:
            continue
        if only is not None and event.event_id in only:
            return event
        if only is None and not open_.intersection(results[event.event_id].missing):
            return event
    return None


async def _provide(
    task: RoomTask,
    servers: Sequence[ServerName],
    event: Event,
    result: AppendResult,
    states: dict[EventId, tuple[EventId, ...]],
) -> bool:
    """Fetch what an event lacks: the state before it, or its auth chain. Return success."""
    if set(event.prev_event_ids).intersection(result.missing):
        state = await state_before(task, servers, event)
        if state is None:
            return False
        states[event.event_id] = state.ids
        return True
    return await fetch_auth_chain(task, servers, event)


async def fetch_auth_chain(task: RoomTask, servers: Sequence[ServerName], event: Event) -> bool:
    """Store the auth chain of an event as outliers; return whether a server returned it."""
    for server in servers:
        try:
            pdus = await task.requests.event_auth(server, task.room_id, event.event_id)
        except RemoteError:  # recorded in task.requests.failures
            continue
        if await task.append_chain((await task.read(pdus)).events, event):
            return True
    return False


# --------------------------------------------------------------------------------------------------
# Backfill: request the history before a room's gaps, with the state before its lowest event.

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
        return sum(
            result.is_stored and result.outcome != "duplicate" for result in self.results.values()
        )


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
        gaps = [gap for gap in gaps if gap.event_id in only]
    if not gaps:
        return BackfillResult("nothing_missing")
    due = [gap for gap in gaps if gap.retry_after_ms == 0][:GAPS_MAX]
    if not due:
        return BackfillResult("paused", retry_after_ms=min(gap.retry_after_ms for gap in gaps))
    servers = await task.servers(*first)
    results, requested = await _from_servers(task, servers, due, limit)
    lacking = _lacking([gap.event_id for gap in due], results)
    if lacking and requested.is_complete:
        await task.store.gap_failed(
            task.room_id, lacking, task.requests.reason(), server_names=requested.servers
        )
    if any(result.is_stored for result in results.values()):
        return BackfillResult("stored", results, task.requests.failures)
    return BackfillResult("failed", results, task.requests.failures)


class RequestedServers(NamedTuple):
    """The servers that were asked for history.

    ``is_complete``: no answer was cut off by the limit, so what is lacking was not returned.
    """

    servers: list[ServerName]
    is_complete: bool


async def _from_servers(
    task: RoomTask, servers: Sequence[ServerName], gaps: Sequence[OpenGap], limit: int
) -> tuple[Results, RequestedServers]:
    """Ask one server after the other, until each of the missing events is stored."""
    ids = [gap.event_id for gap in gaps]
    results: Results = {}
    requested = RequestedServers([], is_complete=True)
    for server in servers:
        lacking = _lacking(ids, results)
        if not lacking:
            break
        requested.servers.append(server)
        others = [server, *(other for other in servers if other != server)]
        page, is_cut = await _from_server(task, others, lacking, limit)
        results |= page
        requested = requested._replace(is_complete=requested.is_complete and not is_cut)
    return results, requested


def _lacking(ids: Sequence[EventId], results: Results) -> list[EventId]:
    return [
        event_id for event_id in ids if event_id not in results or not results[event_id].is_stored
    ]


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
    events = connected(
        {event_id: event for event_id, event in read.items() if event_id not in stored}, ids
    )
    if not events:
        task.requests.failures.setdefault(server, "it returned none of the missing events")
        return {}, False
    fallback = events.keys() & set(ids)
    results = await store_connected(task, servers, events, fallback=fallback, origin="backfill")
    return results, len(pdus) >= limit
