"""Catalogue of latency-critical reads: a name, its arguments, and the call of `Store`.

`room-storage explain` runs one of them on the operator's database, and the inspector does. The plan
tests run them all among a million events. To add one, add a line to `QUESTIONS`.

A call runs on a store of its own that reads by one connection, within its transaction. Its caches
are empty, so each call is that of a process that has just started. Two syncs are of a process that
runs for longer: it is prepared by the statements of `prepare`, which no plan shows.
"""

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple, TypeVar

from storage import arguments as args
from storage.database.connection import Connection, Database
from storage.database.deployment import NO_SERVER, deployment
from storage.database.explained import ExplainingConnection, QueryPlan
from storage.errors import InputError
from storage.ids import server_name_of
from storage.persist import Writer
from storage.queries.filters import SyncFilter
from storage.queries.sliding.response import poll
from storage.queries.sliding.selection import PreparedRequest
from storage.queries.sliding.types import SlidingList, SlidingSyncRequest
from storage.queries.sync.changed_rooms import positions
from storage.store.facade import Store
from storage.store.open import NO_WRITER
from storage.streams import SyncToken, VectorPosition, startup
from storage.streams.reads import Reads
from storage.streams.registry import Streams
from storage.streams.restore_detection import Identity

T = TypeVar("T")

INSTANCE_NAME: Final = "explain"
"""It is in no table: the store writes nothing."""

FOLLOWED_MAX: Final = 10_000
"""Most events that a process is taken to have followed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueryArguments:
    """The arguments of a query. `CatalogueQuery.needs` lists those that it needs."""

    room: str | None = None
    user: str | None = None
    event: str | None = None
    server: str | None = None
    since: str | None = None
    timestamp: int | None = None
    limit: int = 10


Call = Callable[[Store, Any], Awaitable[object]]


@dataclass(frozen=True, slots=True)
class CatalogueQuery:
    """A query. ``needs`` are fields of `QueryArguments`; they are never None in the call.

    ``is_behind``: the process has followed the streams up to the token only. ``prepare`` runs
    before the call, and fills caches.
    """

    about: str
    needs: tuple[str, ...]
    call: Call
    is_behind: bool = False
    prepare: Call | None = None


class ReadsOfConnection(Reads):
    """Reads by one connection, within its transaction."""

    def __init__(self, database: Database, conn: Connection) -> None:
        super().__init__(database)
        self.conn: Connection = conn

    async def run(
        self,
        work: Callable[[Connection], Awaitable[T]],
        *,
        tokens: Iterable[str | None] = (),  # noqa: ARG002  # no standby
        snapshot: bool = False,  # noqa: ARG002  # the transaction is one
    ) -> T:
        return await work(self.conn)

    async def of_primary(self, work: Callable[[Connection], Awaitable[T]]) -> T:
        return await work(self.conn)


def query_of(name: str) -> CatalogueQuery:
    """Return the query of this name, or raise `InputError`."""
    if name not in QUESTIONS:
        raise InputError(f"no query is named {name!r}: {', '.join(QUESTIONS)}")
    return QUESTIONS[name]


class PreparedCall(NamedTuple):
    """A query on a store of its own, whose caches are as the query wants them."""

    store: Store
    reads: ReadsOfConnection
    query: CatalogueQuery
    given: QueryArguments

    async def run(self) -> object:
        return await self.query.call(self.store, self.given)

    async def plans(self, *, generic: bool = False) -> list[QueryPlan]:
        """Run the query, and return the plan of each statement."""
        explaining = ExplainingConnection.over(self.reads.conn, generic=generic)
        self.reads.conn = explaining
        await self.run()
        return explaining.plans


async def prepared(
    database: Database, conn: Connection, name: str, given: QueryArguments
) -> PreparedCall:
    """Return a query that can run once, in the transaction of the connection.

    `InputError` for an unknown name or a missing argument, `InvalidToken`.
    """
    query = query_of(name)
    lacking = [need for need in query.needs if getattr(given, need) is None]
    if lacking:
        raise InputError(f"{name} needs {', '.join(lacking)}")
    if given.event is not None:
        args.event(given.event)  # `Store.event` would return None
    known = await deployment(conn)
    deployment_id = "" if known is None else known.deployment_id
    server_name = None if known is None else known.server_name
    if server_name is None:  # nobody has opened it: any user is local
        server_name = NO_SERVER if given.user is None else server_name_of(args.user(given.user))
    seen = dict(await startup.positions(conn))
    if query.is_behind and given.since is not None:
        since = SyncToken.parse(given.since, deployment_id).position("events") or VectorPosition()
        seen["events"] = {writer: min(at, since.min) for writer, at in seen["events"].items()}
    streams = Streams(database, INSTANCE_NAME, seen, read_only=True)
    reads = streams.reads = ReadsOfConnection(database, conn)
    writer = Writer(database, streams, server_name=server_name, writer_nid=NO_WRITER)
    identity = Identity(server_name, INSTANCE_NAME, NO_WRITER, deployment_id)
    store = Store(database, streams, writer, identity)
    if query.prepare is not None:
        await query.prepare(store, given)
    return PreparedCall(store, reads, query, given)


async def ask(database: Database, conn: Connection, name: str, given: QueryArguments) -> object:
    """Return the result of a query. Errors are those of `prepared`, and of the call."""
    return await (await prepared(database, conn, name, given)).run()


async def with_token(
    conn: Connection, name: str, given: QueryArguments, behind: int
) -> QueryArguments:
    """Return the arguments with a token, where the query needs one and there is none."""
    if "since" in query_of(name).needs and given.since is None:
        return replace(given, since=await token_behind(conn, behind))
    return given


async def token_behind(conn: Connection, behind: int) -> str:
    """Return the token of a client that is ``behind`` positions of the events stream behind."""
    known = await deployment(conn)
    current = (await positions(conn))["events"].furthest()
    token = SyncToken.of({"events": VectorPosition(max(current - behind, 0))})
    return token.print("" if known is None else known.deployment_id)


async def _follow(store: Store, given: Any) -> None:
    """Follow the stream "events" up to now, and cache the rooms of the user."""
    events = store.streams["events"]
    for writer, now in (await store.reads.run(startup.positions))["events"].items():
        seen = events.positions().get(writer, 0)
        rows = await events.rows(seen, now, FOLLOWED_MAX, instance_name=writer)
        store.streams.advance("events", writer, now, rows, local=False)
    store.streams.keep_up()
    await store.reads.run(lambda conn: store.memory.snapshot(conn, args.user(given.user)))


def _sliding_sync(store: Store, given: Any) -> Awaitable[object]:
    """Run the read of the first request of a connection; `Store.sliding_sync` also writes."""
    rooms = SlidingList([(0, given.limit - 1)], required_state=[("m.room.name", "")])
    request = PreparedRequest.of(
        given.user,
        SlidingSyncRequest(lists={"rooms": rooms}, unread=True),
        device_id="DEVICE",
        pos=None,
        ignored=None,
        server_name=store.server_name,
        deployment=store.deployment_id,
        config=store.database.config,
        defined=frozenset(),
    )
    return store.reads.run(lambda conn: poll(conn, request, store.sliding), snapshot=True)


async def _client_events(store: Store, given: Any) -> object:
    found = await store.events([given.event])
    return await store.client_events(given.user, found.values(), device_id="DEVICE")


async def _sharing_changes(store: Store, given: Any) -> object:
    now = SyncToken.of({"events": (await store.reads.run(positions))["events"]})
    return await store.sharing_changes(given.user, given.since, now.print(store.deployment_id))


ONE: Final = {
    "room_id": "room",
    "user_id": "user",
    "event_id": "event",
    "at_event": "event",
    "server_name": "server",
    "timestamp_ms": "timestamp",
    "since": "since",
    "to": "since",
    "limit": "limit",
    "timeline_limit": "limit",
}
"""The parameters of calls of a store, each with the argument that it gets."""
LISTS: Final = {"room_ids": "room", "event_ids": "event", "from_ids": "event", "latest": "event"}
"""Parameters that get a list of one."""


def _read(
    needs: str,
    method: str,
    about: str,
    *,
    is_behind: bool = False,
    prepare: Call | None = None,
    **fixed: object,
) -> CatalogueQuery:
    """Return the query that a method of `Store` answers, with what it needs, and a limit."""
    names = needs.split()
    parameters = inspect.signature(getattr(Store, method)).parameters
    wanted = [*names, "limit"]

    async def call(store: Store, given: Any) -> object:
        values = {name: getattr(given, ONE[name]) for name in parameters if ONE.get(name) in wanted}
        values |= {
            name: [getattr(given, LISTS[name])] for name in parameters if LISTS.get(name) in names
        }
        return await getattr(store, method)(**values | fixed)

    return CatalogueQuery(about, tuple(names), call, is_behind, prepare)


KEYS: Final = (("m.room.power_levels", ""), ("m.room.join_rules", ""))
TYPES: Final = ("m.room.create", "m.room.name", "m.room.power_levels")
LAZY: Final = SyncFilter(lazy_load_members=True)

QUESTIONS: Final[Mapping[str, CatalogueQuery]] = {
    "sync": _read("user since", "sync", "what is new to a user since a token"),
    "sync-remembered": _read(
        "user since",
        "sync",
        "the same, where the caches have the rooms that can have changed",
        is_behind=True,
    ),
    "sync-timelines": _read(
        "user since",
        "sync",
        "the same, where only some timelines have new events",
        is_behind=True,
        prepare=_follow,
    ),
    "initial-sync": _read("user", "sync", "everything of a user"),
    "lazy-sync": _read(
        "user since",
        "sync",
        "what is new to a user since a token, with the members that matter only",
        filter=LAZY,
    ),
    "initial-lazy-sync": _read(
        "user", "sync", "everything of a user, with the members that matter only", filter=LAZY
    ),
    "sliding-sync": CatalogueQuery(
        "the first rooms of a list, in a process without caches", ("user",), _sliding_sync
    ),
    "messages": _read("room user", "messages", "the last page of a room"),
    "messages-forwards": _read("room user", "messages", "the first page of a room", direction="f"),
    "messages-since": _read(
        "room user since", "messages", "the last page of a room, down to where a client was"
    ),
    "context": _read("event user", "context", "an event with those around it, and the state there"),
    "relations": _read("event user", "relations", "the latest events that relate to one"),
    "relations-indirect": _read(
        "event user", "relations", "the same with indirect relations", recurse=True
    ),
    "threads": _read("room user", "threads", "the latest threads of a room"),
    "unread": _read("user", "unread", "the unread counts of a user's rooms"),
    "aggregations": _read("event user", "aggregations", "the aggregations of an event"),
    "client-events": CatalogueQuery(
        "an event as a client gets it", ("event", "user"), _client_events
    ),
    "event-before": _read(
        "room user timestamp",
        "event_near",
        "the event nearest to a time, before it",
        direction="b",
    ),
    "event-after": _read(
        "room user timestamp", "event_near", "the event nearest to a time, after it", direction="f"
    ),
    "event": _read("event", "event", "one event"),
    "backfill": _read("room event server", "backfill", "an event and its ancestors, for a server"),
    "missing-events": _read(
        "room event server",
        "missing_events",
        "the ancestors of an event, for a server",
        earliest=(),
    ),
    "state-ids": _read("event", "state_ids", "the state before an event with its auth chain"),
    "event-auth": _read("event", "event_auth", "the auth chain of an event, whole"),
    "auth-chain": _read("event", "auth_chain_ids", "the ids of the auth chain of an event"),
    "state-at": _read("event", "state_before", "the whole state before an event"),
    "state-keys": _read(
        "event", "state_before", "a few keys of the state before an event", keys=KEYS
    ),
    "state-types": _read(
        "event", "state_before", "a few types of the state before an event", types=TYPES
    ),
    "visible-to-server": _read(
        "server event", "visible_to_server", "whether a server may have an event whole"
    ),
    "is-resident": _read("server room", "is_resident", "whether a server is in a room now"),
    "joined-servers": _read("room", "joined_servers", "the servers in a room now"),
    "joined-servers-at": _read("room event", "joined_servers", "the servers in a room at an event"),
    "server-event-before": _read(
        "room server timestamp",
        "timestamp_to_event",
        "the event nearest to a time, before it, for a server",
        direction="b",
    ),
    "server-event-after": _read(
        "room server timestamp",
        "timestamp_to_event",
        "the event nearest to a time, after it, for a server",
        direction="f",
    ),
    "current-state": _read("room", "current_state", "the current state of a room"),
    "room-info": _read("room", "rooms", "a room as its state describes it"),
    "space-children": _read("room", "space_children", "the children of a space"),
    "membership": _read("room user", "membership", "the membership of a user in a room"),
    "members": _read(
        "room", "members", "the events of the joined members of a room", membership="join"
    ),
    "member-ids": _read("room", "member_ids", "the joined members of a room"),
    "users-sharing": _read("user", "users_sharing", "the users who share a room"),
    "sharing-changes": CatalogueQuery(
        "the users who share a room since a token", ("user", "since"), _sharing_changes
    ),
    "rooms-of": _read("user", "rooms_of", "the rooms that a user is in"),
    "visible-to-user": _read("user event", "visible_to_user", "whether a user may see an event"),
}
