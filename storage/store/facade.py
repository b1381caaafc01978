"""`Store`: what a homeserver holds.

It owns the pool, the writer and its caches, and opens a connection for each question.

Every method does one thing: take a connection (or a snapshot), call one function below, give the
answer back.
"""

from collections.abc import Collection, Iterable, Mapping
from time import perf_counter, time_ns

from storage import arguments as args
from storage.database.connection import Connection, Database
from storage.ids import EventId, RoomId, StateKey, UserId
from storage.maintenance.explain import Explanation, explain_visibility
from storage.observability.counters import Measures
from storage.observability.instrument import measured
from storage.persist import AppendResult, Origin, Writer
from storage.persist.append import AppendOptions, append
from storage.persist.erasure import erase_user, restore_user
from storage.persist.receive import Pdu, VerifyKeys
from storage.persist.stripped_state import StrippedState
from storage.queries import aggregations as aggregating
from storage.queries import (
    auth_chain,
    context,
    events,
    federation,
    gaps,
    messages,
    relations,
    state,
    state_at,
)
from storage.queries import event_auth as auth_queries
from storage.queries import timestamp_to_event as timestamps
from storage.queries.context import Context
from storage.queries.event_auth import StateIds
from storage.queries.events import Aggregations, StoredEvent
from storage.queries.filters import ANY_EVENT, ANY_ROOM, EventFilter, SyncFilter
from storage.queries.gaps import OpenGap
from storage.queries.messages import Direction, Page
from storage.queries.relations import RelationsPage
from storage.queries.state_entries import StateMap
from storage.queries.sync import (
    Look,
    Sync,
    SyncMemory,
    SyncRequest,
    brief,
    is_brief,
    is_quiet,
    look,
    quiet,
    until_news,
)
from storage.queries.sync.changed_rooms import News, rooms_of
from storage.queries.visible_events import visible_to_server, visible_to_user
from storage.streams import SyncToken, VectorPosition
from storage.streams.account_data import AccountData
from storage.streams.caches import ReadCaches, RoomsOf
from storage.streams.identity import Identity
from storage.streams.notifier import Notifier
from storage.streams.receipts import Receipts
from storage.streams.registry import Streams
from storage.streams.stream_writer import StreamWriter
from storage.streams.to_device import ToDevice


class Store:
    """The rooms of one homeserver, on one database. Opened by `storage.open`."""

    def __init__(
        self, database: Database, streams: Streams, writer: Writer, identity: Identity
    ) -> None:
        self.database = database
        self.streams = streams
        self.writer = writer
        self.server_name = identity.server_name
        self.instance_name = identity.instance_name
        self.deployment_id = identity.deployment_id
        self.notifier = Notifier(streams, remembered=database.config.notifier_keys_max)
        self.caches: ReadCaches[StoredEvent, StateMap] = ReadCaches.of(
            database.config, streams.feed, self._furthest()
        )
        streams.on_restart(lambda _: self.caches.restart(self._furthest()))
        self.memory = SyncMemory(
            lambda name: streams[name].positions(),
            self.caches.rooms_of,
            self.caches.room_changes,
            self.caches.state_changes,
        )
        small = {
            name: StreamWriter(name, database, streams, identity.writer_nid)
            for name in ("account_data", "to_device", "receipts")
        }
        self.account_data = AccountData(small["account_data"], identity.server_name)
        self.to_device = ToDevice(small["to_device"], identity.server_name)
        self.receipts = Receipts(small["receipts"])

    def _furthest(self) -> int:
        """Above it every event will be told."""
        return self.streams["events"].current().furthest()

    @property
    def measures(self) -> Measures:
        """What is counted and timed of this store; `storage.observability.prometheus` gives it to Prometheus."""
        return self.database.measures

    # ----------------------------------------------------------------------------------------------
    # writing

    @measured("append")
    async def append(
        self,
        pdus: Iterable[Pdu],
        *,
        room_version: str | None = None,
        origin: Origin = "live",
        state_before: Mapping[EventId, Iterable[EventId]] | None = None,
        stripped_state: StrippedState | None = None,
        verify_keys: VerifyKeys | None = None,
    ) -> list[AppendResult]:
        """Store PDUs; one result per PDU, in order (`storage.persist.append.AppendOptions`).

        A bad PDU is an outcome, a bad argument an `InputError`.
        """
        given = AppendOptions(room_version, origin, state_before, stripped_state, verify_keys)
        results = await append(self.database, self.writer, pdus, given)
        self.measures.append_events.add(len(results))
        self.measures.outcomes.update(result.outcome for result in results)
        return results

    async def erase_user(self, user_id: str) -> None:
        """From now on, who was not in the room when this user sent something gets it redacted; so do servers. `InvalidIdentifier`."""
        user = args.user(user_id)
        async with self.database.connection() as conn:
            await erase_user(conn, user, time_ns() // 1_000_000)

    async def restore_user(self, user_id: str) -> None:
        """Take `erase_user` back. One who was not erased stays as they are. `InvalidIdentifier`."""
        user = args.user(user_id)
        async with self.database.connection() as conn:
            await restore_user(conn, user)

    # ----------------------------------------------------------------------------------------------
    # one thing

    async def event(self, event_id: EventId, *, redact: bool = True) -> StoredEvent | None:
        """One event, or None if it is not held.

        ``redact`` False shows its content also where a redaction took effect.
        """
        return (await self.events([event_id], redact=redact)).get(event_id)

    @measured("events")
    async def events(
        self, event_ids: Iterable[EventId], *, redact: bool = True
    ) -> dict[EventId, StoredEvent]:
        """The events that are held, by id."""
        wanted = [
            event_id for event_id in args.listed(event_ids, "event_ids") if args.is_text(event_id)
        ]
        if not (args.flag(redact, "redact") and self.database.config.cache_reads):
            async with self.database.connection() as conn:
                return await events.events(conn, wanted, redacted=redact)
        return await self.caches.events.many(wanted, self._load_events)

    async def _load_events(self, event_ids: list[EventId]) -> dict[EventId, StoredEvent]:
        async with self.database.connection() as conn:
            return await events.events(conn, event_ids)

    async def state_before(
        self,
        event_id: EventId,
        *,
        types: Iterable[str] | None = None,
        keys: Iterable[StateKey] | None = None,
    ) -> StateMap:
        """The state before an event.

        `UnknownEvent`, `StateUnknown` for an outlier, `StorageCorrupt`. Filters as in
        `states_before`.
        """
        return (await self.states_before([event_id], types=types, keys=keys))[event_id]

    async def state_after(
        self,
        event_id: EventId,
        *,
        types: Iterable[str] | None = None,
        keys: Iterable[StateKey] | None = None,
    ) -> StateMap:
        """The state after an event; that before it unless it is an accepted state event."""
        return (await self.states_after([event_id], types=types, keys=keys))[event_id]

    @measured("state")
    async def states_before(
        self,
        event_ids: Iterable[EventId],
        *,
        types: Iterable[str] | None = None,
        keys: Iterable[StateKey] | None = None,
    ) -> dict[EventId, StateMap]:
        """The states before many events at once: whole, or of some types, or under some (type, state key), never both filters.

        `UnknownEvent`, `StateUnknown` for an outlier, `StorageCorrupt` for a state that cannot be read, `InputError`.
        """
        return await self._states(event_ids, types, keys, after=False)

    @measured("state")
    async def states_after(
        self,
        event_ids: Iterable[EventId],
        *,
        types: Iterable[str] | None = None,
        keys: Iterable[StateKey] | None = None,
    ) -> dict[EventId, StateMap]:
        """The states after many events at once; see `states_before`."""
        return await self._states(event_ids, types, keys, after=True)

    async def _states(
        self,
        event_ids: Iterable[EventId],
        types: Iterable[str] | None,
        keys: Iterable[StateKey] | None,
        *,
        after: bool,
    ) -> dict[EventId, StateMap]:
        ids, pairs, wanted = (
            args.events(event_ids),
            args.keys(keys),
            None if types is None else args.texts(types, "types"),
        )
        async with self.database.connection() as conn:
            return await state_at.states_at(
                conn, ids, after=after, types=wanted, keys=pairs, remembered=self.caches.states
            )

    @measured("current_state")
    async def current_state(
        self, room_id: RoomId, *, types: Iterable[str] | None = None
    ) -> StateMap:
        """The current state of a room. `UnknownRoom`."""
        room, wanted = args.room(room_id), None if types is None else args.texts(types, "types")
        if types is None and self.database.config.cache_reads:
            return dict(
                (await self.caches.current_state.many([room_id], self._load_current_states))[
                    room_id
                ]
            )
        async with self.database.connection() as conn:
            return await state.current_state(conn, room, types=wanted)

    async def _load_current_states(self, room_ids: list[RoomId]) -> dict[RoomId, StateMap]:
        async with self.database.connection() as conn:
            return {room_id: await state.current_state(conn, room_id) for room_id in room_ids}

    async def forward_extremities(self, room_id: RoomId) -> set[EventId]:
        """The events on which the next one will build. `UnknownRoom`."""
        room = args.room(room_id)
        async with self.database.connection() as conn:
            return await state.forward_extremities(conn, room)

    async def backward_extremities(self, room_id: RoomId) -> set[EventId]:
        """The ids of the missing events at which the held history ends. `UnknownRoom`."""
        room = args.room(room_id)
        async with self.database.connection() as conn:
            return await state.backward_extremities(conn, room)

    async def rooms_of(self, user_id: UserId) -> list[RoomId]:
        """The rooms that a local user is joined to.

        `InvalidIdentifier`, also for a user of another server.
        """
        args.local_user(user_id, self.server_name)
        if self.database.config.cache_reads:
            return sorted(
                map(
                    RoomId,
                    (await self.caches.rooms_of.many([user_id], self._load_rooms_of))[
                        user_id
                    ].joined,
                )
            )
        async with self.database.connection() as conn:
            return await state.rooms_of(conn, user_id)

    async def _load_rooms_of(self, user_ids: list[UserId]) -> dict[UserId, RoomsOf]:
        async with self.database.connection() as conn:
            return {user_id: await rooms_of(conn, user_id) for user_id in user_ids}

    async def visible_to_user(self, user_id: str, event_ids: Iterable[str]) -> set[EventId]:
        """Those of the events that a local user may see.

        `InvalidIdentifier`, also for a user of another server.
        """
        user, ids = args.local_user(user_id, self.server_name), args.events(event_ids)
        async with self.database.connection() as conn:
            return await visible_to_user(conn, user, ids)

    async def visible_to_server(self, server_name: str, event_ids: Iterable[str]) -> set[EventId]:
        """Those of the events that a server may have whole; for one that was never joined, world-readable events. `InvalidIdentifier`."""
        server, ids = args.server(server_name), args.events(event_ids)
        async with self.database.connection() as conn:
            return await visible_to_server(conn, server, ids)

    async def explain_visibility(self, event_id: str, user_or_server: str) -> Explanation:
        """Why a local user, or a server, may see an event or may not; `Explanation.sentence` says it. `InvalidIdentifier`, `UnknownEvent`."""
        is_user, wanted = args.text(user_or_server).startswith("@"), args.event(event_id)
        whom = (
            args.local_user(user_or_server, self.server_name)
            if is_user
            else args.server(user_or_server)
        )
        async with self.database.transaction(isolation="repeatable_read", readonly=True) as conn:
            return await explain_visibility(conn, wanted, whom)

    # ----------------------------------------------------------------------------------------------
    # sync and pages

    @measured("sync", timed=False)
    async def sync(
        self,
        user_id: str,
        *,
        since: str | None = None,
        timeline_limit: int = 10,
        rooms_limit: int | None = None,
        full_state: bool = False,
        timeout_ms: int = 0,
        ignored: Collection[UserId] = (),
        filter: SyncFilter = ANY_ROOM,  # noqa: A002  # as the client-server API calls it
    ) -> Sync:
        """What is new to a local user since a token; None: everything (api.md, "Sync").

        ``rooms_limit`` is for an initial sync: the rooms with the latest activity;
        `Sync.next_rooms` as ``since`` brings the next ones. ``full_state`` tells the whole state of
        every joined room. ``timeout_ms`` waits for something to happen. Events of the ``ignored``
        are left out, but for state, as in `messages` and `context`; so are their invites.
        ``filter``: only some rooms, events or members (`storage.SyncFilter`). A timeline that is
        `limited` lacks something: also where history is missing, or where of the last
        `Config.traversal_rows_max` events too few pass or are visible; `prev_batch` leads to it.
        `InvalidToken`, `ResyncNeeded`, `InputError`.
        """
        wait_ms = args.limit(timeout_ms, args.LARGEST, "timeout_ms")
        asked = SyncRequest.of(
            user_id,
            since,
            timeline_limit=timeline_limit,
            rooms_limit=rooms_limit,
            full_state=args.flag(full_state, "full_state"),
            ignored=args.users(ignored),
            filter=args.instance(filter, SyncFilter, "filter"),
            server_name=self.server_name,
            deployment=self.deployment_id,
            config=self.database.config,
        )
        return await until_news(
            lambda: self._look(asked, waits=wait_ms > 0),
            self.notifier,
            self.deployment_id,
            asked.since,
            timeout_ms=wait_ms,
        )

    def positions_of(self, token: str) -> dict[str, VectorPosition]:
        """Where a token of sync (`Sync.next_batch`) is in each stream: events, account_data, receipts, to_device. `InvalidToken`.

        What is new is above `VectorPosition.min`. Read a stream that is not there from 0: it came with an upgrade.
        """
        return SyncToken.parse(token, self.deployment_id).positions()

    async def _look(self, asked: SyncRequest, *, waits: bool) -> Look:
        """One look at what is new, timed; a sync that waits looks several times."""
        began = perf_counter()
        try:
            return await self._looked_within_an_era(asked, waits=waits)
        finally:
            self.measures.call("sync" if asked.since is not None else "first_sync").add(
                perf_counter() - began
            )

    async def _looked_within_an_era(self, asked: SyncRequest, *, waits: bool) -> Look:
        """An answer of one database.

        `ResyncNeeded` if the token is of what another one has lost.
        """
        while True:
            era = self.database.era
            if self.streams.lost and asked.token is not None:
                self.streams.refuse_lost(asked.text, asked.token)
            found = await self._looked(asked, waits=waits)
            if era == self.database.era:
                return found

    async def _looked(self, asked: SyncRequest, *, waits: bool) -> Look:
        was_quiet = is_quiet(asked, self.memory)
        if was_quiet or is_brief(asked, self.memory):
            async with self.database.connection() as conn:
                if found := await (quiet if was_quiet else brief)(conn, asked, self.memory):
                    return (
                        await self._waited(conn, asked, *found)
                        if waits and found[0].is_empty
                        else Look(found[0], ())
                    )
        async with self.database.transaction(isolation="repeatable_read", readonly=True) as conn:
            answer, news = await look(conn, asked, self.memory, anew=waits and was_quiet)
            return (
                await self._waited(conn, asked, answer, news)
                if waits and answer.is_empty
                else Look(answer, ())
            )

    async def _waited(
        self, conn: Connection, asked: SyncRequest, answer: Sync, news: News | None
    ) -> Look:
        """The answer with what to wait for.

        ``news``: perhaps the user's rooms are known from there.
        """
        rooms = None if news is None else news.room_ids
        return Look(
            answer,
            (
                asked.user_id,
                *(await state.rooms_of(conn, asked.user_id) if rooms is None else rooms),
            ),
        )

    @measured("messages")
    async def messages(
        self,
        room_id: RoomId,
        user_id: str,
        *,
        from_: str | None = None,
        to: str | None = None,
        direction: Direction = "b",
        limit: int = 10,
        ignored: Collection[UserId] = (),
        filter: EventFilter = ANY_EVENT,  # noqa: A002
        aggregations: bool = False,
    ) -> Page:
        """A page of a room's history, backwards ("b") from ``from_`` (None: the end) or forwards ("f"; None: the beginning).

        Exactly ``limit`` visible events that pass the ``filter`` unless there are no more (`Page.end` is None). Tokens of sync are taken as well.
        ``aggregations``: each event with its `StoredEvent.relations`. `UnknownRoom`, `InvalidIdentifier`, `InvalidToken`, `InputError`.
        """
        room, user, silent = (
            args.room(room_id),
            args.local_user(user_id, self.server_name),
            args.users(ignored),
        )
        asked = messages.between(from_, to, direction, self._limit(limit), self.deployment_id)
        wanted, bundles = (
            args.instance(filter, EventFilter, "filter"),
            args.flag(aggregations, "aggregations"),
        )
        rows_max = self.database.config.traversal_rows_max
        async with self.database.connection() as conn:
            page = await messages.messages(
                conn,
                room,
                user,
                asked,
                self.deployment_id,
                rows_max=rows_max,
                ignored=silent,
                wanted=wanted,
            )
            return await aggregating.of_page(conn, user, page, ignored=silent) if bundles else page

    @measured("context")
    async def context(
        self,
        event_id: EventId,
        user_id: str,
        *,
        limit: int = 10,
        ignored: Collection[UserId] = (),
        filter: EventFilter = ANY_EVENT,  # noqa: A002
        aggregations: bool = False,
    ) -> Context:
        """An event amid at most ``limit`` others that pass the ``filter``, and the state there.

        `UnknownEvent` also where the user may not see it.
        """
        target, user, silent = (
            args.event(event_id),
            args.local_user(user_id, self.server_name),
            args.users(ignored),
        )
        most, bundles = self._limit(limit), args.flag(aggregations, "aggregations")
        wanted = args.instance(filter, EventFilter, "filter")
        async with self.database.transaction(isolation="repeatable_read", readonly=True) as conn:
            found = await context.context(
                conn,
                target,
                user,
                limit=most,
                deployment=self.deployment_id,
                ignored=silent,
                wanted=wanted,
            )
            return (
                await aggregating.of_context(conn, user, found, ignored=silent)
                if bundles
                else found
            )

    @measured("relations")
    async def relations(
        self,
        event_id: str,
        user_id: str,
        *,
        rel_type: str | None = None,
        event_type: str | None = None,
        from_: str | None = None,
        to: str | None = None,
        direction: Direction = "b",
        limit: int = 10,
        recurse: bool = False,
        ignored: Collection[UserId] = (),
        aggregations: bool = False,
    ) -> RelationsPage:
        """A page of what relates to an event (edits, reactions, references, threads), newest first, or oldest first ("f").

        ``rel_type`` and ``event_type`` pick from it; ``recurse`` adds what relates to those, and so on (`RelationsPage.recursion_depth`).
        Limits and tokens are as in `messages`. `UnknownEvent` also where the user may not see it, `InvalidToken`, `InputError`.
        """
        user, target, silent = (
            args.local_user(user_id, self.server_name),
            args.event(event_id),
            args.users(ignored),
        )
        kinds = [None if kind is None else args.text(kind) for kind in (rel_type, event_type)]
        deep, bundles = args.flag(recurse, "recurse"), args.flag(aggregations, "aggregations")
        wanted = relations.RelationFilter(
            rel_type=kinds[0], event_type=kinds[1], ignored=silent, recurse=deep
        )
        asked = messages.between(from_, to, direction, self._limit(limit), self.deployment_id)
        rows_max = self.database.config.traversal_rows_max
        async with self.database.connection() as conn:
            page = await relations.relations(
                conn, target, user, wanted, asked, deployment=self.deployment_id, rows_max=rows_max
            )
            return await aggregating.of_page(conn, user, page, ignored=silent) if bundles else page

    @measured("aggregations")
    async def aggregations(
        self, user_id: str, event_ids: Iterable[str], *, ignored: Collection[UserId] = ()
    ) -> dict[EventId, Aggregations]:
        """What is told to a user together with events: the latest edit, the thread in short, references. For /sync and single events.

        Of any number of events in one statement; those of which nothing is told are left out. `InvalidIdentifier`.
        """
        user, ids, silent = (
            args.local_user(user_id, self.server_name),
            args.events(event_ids),
            args.users(ignored),
        )
        async with self.database.connection() as conn:
            return await aggregating.aggregations(conn, user, ids, ignored=silent)

    @measured("event_near")
    async def event_near(
        self, room_id: RoomId, user_id: str, timestamp_ms: int, direction: Direction
    ) -> StoredEvent | None:
        """The visible event at, or nearest before ("b") or after ("f") a time.

        None if there is none. `UnknownRoom`.
        """
        room, user = args.room(room_id), args.local_user(user_id, self.server_name)
        at = args.whole(timestamp_ms, "timestamp_ms")
        async with self.database.connection() as conn:
            return await timestamps.event_near(
                conn, room, user, at, direction, rows_max=self.database.config.traversal_rows_max
            )

    # ----------------------------------------------------------------------------------------------
    # federation

    async def is_resident(self, server_name: str, room_id: RoomId) -> bool:
        """Return whether a user of the server is joined to the room now; refuse a server that has left by this. `UnknownRoom`."""
        server, room = args.server(server_name), args.room(room_id)
        async with self.database.connection() as conn:
            return await federation.is_resident(conn, server, room)

    @measured("backfill")
    async def backfill(
        self,
        room_id: RoomId,
        from_ids: Iterable[str],
        limit: int,
        *,
        server_name: str | None = None,
    ) -> list[StoredEvent]:
        """These events and their ancestors, newest first; for a server, what it may not see comes redacted. `UnknownRoom`.

        A server that was never joined to the room gets the world-readable ones only. For a server, ``raw`` is redacted where ``json`` is.
        """
        room, ids, server = (
            args.room(room_id),
            args.events(from_ids),
            None if server_name is None else args.server(server_name),
        )
        async with self.database.connection() as conn:
            return await federation.backfill(
                conn,
                room,
                ids,
                self._limit(limit),
                server_name=server,
                rows_max=self.database.config.traversal_rows_max,
            )

    @measured("missing_events")
    async def missing_events(
        self,
        room_id: RoomId,
        earliest: Iterable[str],
        latest: Iterable[str],
        *,
        limit: int = 10,
        min_depth: int = 0,
        server_name: str | None = None,
    ) -> list[StoredEvent]:
        """What lies between ``earliest`` and ``latest``, both left out, oldest first (breadth first from the latest). `UnknownRoom`.

        For a server as in `backfill`.
        """
        room, early, late = args.room(room_id), args.events(earliest), args.events(latest)
        server = None if server_name is None else args.server(server_name)
        async with self.database.connection() as conn:
            return await federation.missing_events(
                conn,
                room,
                early,
                late,
                limit=self._limit(limit),
                min_depth=args.whole(min_depth, "min_depth"),
                server_name=server,
                rows_max=self.database.config.traversal_rows_max,
            )

    @measured("state_ids")
    async def state_ids(self, event_id: EventId) -> StateIds:
        """The state before an event, and the auth chain of that state.

        `UnknownEvent`, `StateUnknown` for an outlier.
        """
        wanted = args.event(event_id)
        async with self.database.connection() as conn:
            return await auth_queries.state_ids(conn, wanted)

    @measured("event_auth")
    async def event_auth(self, event_id: EventId) -> list[StoredEvent]:
        """The auth chain of an event, without itself, as far as it lies in the event's room.

        `UnknownEvent`.
        """
        wanted = args.event(event_id)
        async with self.database.connection() as conn:
            return await auth_queries.event_auth(conn, wanted)

    async def auth_chain_ids(self, event_ids: Iterable[str]) -> set[EventId]:
        """The union of the auth chains of these events. `UnknownEvent`."""
        ids = args.events(event_ids)
        async with self.database.connection() as conn:
            return await auth_chain.auth_chain_ids(conn, ids)

    async def auth_chain_difference(self, sets: Iterable[Iterable[str]]) -> set[EventId]:
        """What is in the auth chains of some of the sets but not of all. `UnknownEvent`."""
        ids = [args.events(one) for one in args.listed(sets, "sets")]
        async with self.database.connection() as conn:
            return await auth_chain.auth_chain_difference(conn, ids)

    async def gaps(self, room_id: RoomId) -> list[OpenGap]:
        """The missing parents of held events, the latest first, with what is known of each and when to ask for it again. `UnknownRoom`."""
        room = args.room(room_id)
        async with self.database.connection() as conn:
            return await gaps.gaps(conn, room, time_ns() // 1_000_000)

    async def gap_failed(
        self,
        room_id: RoomId,
        event_ids: Iterable[str],
        reason: str,
        *,
        server_names: Iterable[str] = (),
    ) -> None:
        """Other servers were asked for these missing events in vain: `OpenGap.retry_after_ms` doubles with each failure.

        ``server_names`` were asked: when one is up again (`server_up`), the pause ends. Ids that are no gaps are passed over. `UnknownRoom`.
        """
        room, ids, told = args.room(room_id), args.events(event_ids), args.text(reason)
        servers = [args.server(name) for name in args.texts(server_names, "server_names")]
        now_ms = time_ns() // 1_000_000

        async def note(conn: Connection) -> None:
            await gaps.gap_failed(
                conn, room, ids, told, servers=servers, now_ms=now_ms, config=self.database.config
            )

        await self.database.run(note)

    async def server_up(self, server_name: str) -> None:
        """A server can be reached again: what it failed to give is to be asked for now.

        Replication calls it for REMOTE_SERVER_UP.
        """
        server = args.server(server_name)
        async with self.database.connection() as conn:
            await gaps.server_up(conn, server)

    def _limit(self, limit: int) -> int:
        """At most `Config.page_limit_max`; `InputError` for a negative one."""
        return args.limit(limit, self.database.config.page_limit_max)
