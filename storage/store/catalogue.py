"""Catalogue of latency-critical reads: name, arguments, and the call of a store that answers.

`room-storage explain` runs one of them on the operator's database. The plan tests run them all
among a million events. To add one, add a line to `QUESTIONS`.

A call runs on a store of its own that reads by one connection, within its transaction. Its caches
are empty, so each call is that of a process that has just started. Two syncs are of a process that
runs for longer: it is prepared by the statements of `prepare`, which no plan shows.
"""

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

from storage import arguments as args
from storage.database.connection import Connection, Database
from storage.database.deployment import NO_SERVER, deployment
from storage.database.explained import ExplainingConnection, QueryPlan
from storage.errors import InputError
from storage.ids import server_name_of
from storage.persist import Writer
from storage.queries.filters import SyncFilter
from storage.queries.pagination.page import Direction
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
    query = QUESTIONS.get(name)
    if query is None:
        raise InputError(f"no query is named {name!r}: {', '.join(QUESTIONS)}")
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


def _sync(store: Store, given: Any) -> Awaitable[object]:
    return store.sync(given.user, since=given.since, timeline_limit=given.limit)


def _lazy_sync(store: Store, given: Any) -> Awaitable[object]:
    lazy = SyncFilter(lazy_load_members=True)
    return store.sync(given.user, since=given.since, timeline_limit=given.limit, filter=lazy)


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


def _messages(direction: Direction) -> Call:
    return lambda s, a: s.messages(a.room, a.user, direction=direction, limit=a.limit)


def _near(direction: Direction) -> Call:
    return lambda s, a: s.event_near(a.room, a.user, a.timestamp, direction)


def _server_near(direction: Direction) -> Call:
    return lambda s, a: s.timestamp_to_event(a.room, a.timestamp, direction, server_name=a.server)


KEYS: Final = (("m.room.power_levels", ""), ("m.room.join_rules", ""))
TYPES: Final = ("m.room.create", "m.room.name", "m.room.power_levels")

SYNCED: Final = ("user", "since")
PAGED: Final = ("room", "user")
RELATED: Final = ("event", "user")
TRAVERSED: Final = ("room", "event", "server")
TIMED: Final = ("room", "server", "timestamp")

QUESTIONS: Final[Mapping[str, CatalogueQuery]] = {
    "sync": CatalogueQuery("what is new to a user since a token", SYNCED, _sync),
    "sync-remembered": CatalogueQuery(
        "the same, where the caches have the rooms that can have changed",
        SYNCED,
        _sync,
        is_behind=True,
    ),
    "sync-timelines": CatalogueQuery(
        "the same, where only some timelines have new events",
        SYNCED,
        _sync,
        is_behind=True,
        prepare=_follow,
    ),
    "initial-sync": CatalogueQuery("everything of a user", ("user",), _sync),
    "lazy-sync": CatalogueQuery(
        "what is new to a user since a token, with the members that matter only",
        SYNCED,
        _lazy_sync,
    ),
    "initial-lazy-sync": CatalogueQuery(
        "everything of a user, with the members that matter only", ("user",), _lazy_sync
    ),
    "sliding-sync": CatalogueQuery(
        "the first rooms of a list, in a process without caches", ("user",), _sliding_sync
    ),
    "messages": CatalogueQuery("the last page of a room", PAGED, _messages("b")),
    "messages-forwards": CatalogueQuery("the first page of a room", PAGED, _messages("f")),
    "messages-since": CatalogueQuery(
        "the last page of a room, down to where a client was",
        (*PAGED, "since"),
        lambda s, a: s.messages(a.room, a.user, to=a.since, limit=a.limit),
    ),
    "context": CatalogueQuery(
        "an event with those around it, and the state there",
        RELATED,
        lambda s, a: s.context(a.event, a.user, limit=a.limit),
    ),
    "relations": CatalogueQuery(
        "the latest events that relate to one",
        RELATED,
        lambda s, a: s.relations(a.event, a.user, limit=a.limit),
    ),
    "relations-indirect": CatalogueQuery(
        "the same with indirect relations",
        RELATED,
        lambda s, a: s.relations(a.event, a.user, limit=a.limit, recurse=True),
    ),
    "threads": CatalogueQuery(
        "the latest threads of a room",
        PAGED,
        lambda s, a: s.threads(a.room, a.user, limit=a.limit),
    ),
    "unread": CatalogueQuery(
        "the unread counts of a user's rooms", ("user",), lambda s, a: s.unread(a.user)
    ),
    "aggregations": CatalogueQuery(
        "the aggregations of an event", RELATED, lambda s, a: s.aggregations(a.user, [a.event])
    ),
    "client-events": CatalogueQuery("an event as a client gets it", RELATED, _client_events),
    "event-before": CatalogueQuery(
        "the event nearest to a time, before it", (*PAGED, "timestamp"), _near("b")
    ),
    "event-after": CatalogueQuery(
        "the event nearest to a time, after it", (*PAGED, "timestamp"), _near("f")
    ),
    "event": CatalogueQuery("one event", ("event",), lambda s, a: s.event(a.event)),
    "backfill": CatalogueQuery(
        "an event and its ancestors, for a server",
        TRAVERSED,
        lambda s, a: s.backfill(a.room, [a.event], a.limit, server_name=a.server),
    ),
    "missing-events": CatalogueQuery(
        "the ancestors of an event, for a server",
        TRAVERSED,
        lambda s, a: s.missing_events(a.room, [], [a.event], limit=a.limit, server_name=a.server),
    ),
    "state-ids": CatalogueQuery(
        "the state before an event with its auth chain",
        ("event",),
        lambda s, a: s.state_ids(a.event),
    ),
    "event-auth": CatalogueQuery(
        "the auth chain of an event, whole", ("event",), lambda s, a: s.event_auth(a.event)
    ),
    "auth-chain": CatalogueQuery(
        "the ids of the auth chain of an event",
        ("event",),
        lambda s, a: s.auth_chain_ids([a.event]),
    ),
    "state-at": CatalogueQuery(
        "the whole state before an event", ("event",), lambda s, a: s.state_before(a.event)
    ),
    "state-keys": CatalogueQuery(
        "a few keys of the state before an event",
        ("event",),
        lambda s, a: s.state_before(a.event, keys=KEYS),
    ),
    "state-types": CatalogueQuery(
        "a few types of the state before an event",
        ("event",),
        lambda s, a: s.state_before(a.event, types=TYPES),
    ),
    "visible-to-server": CatalogueQuery(
        "whether a server may have an event whole",
        ("server", "event"),
        lambda s, a: s.visible_to_server(a.server, [a.event]),
    ),
    "is-resident": CatalogueQuery(
        "whether a server is in a room now",
        ("server", "room"),
        lambda s, a: s.is_resident(a.server, a.room),
    ),
    "joined-servers": CatalogueQuery(
        "the servers in a room now", ("room",), lambda s, a: s.joined_servers(a.room)
    ),
    "joined-servers-at": CatalogueQuery(
        "the servers in a room at an event",
        ("room", "event"),
        lambda s, a: s.joined_servers(a.room, at_event=a.event),
    ),
    "server-event-before": CatalogueQuery(
        "the event nearest to a time, before it, for a server", TIMED, _server_near("b")
    ),
    "server-event-after": CatalogueQuery(
        "the event nearest to a time, after it, for a server", TIMED, _server_near("f")
    ),
    "current-state": CatalogueQuery(
        "the current state of a room", ("room",), lambda s, a: s.current_state(a.room)
    ),
    "room-info": CatalogueQuery(
        "a room as its state describes it", ("room",), lambda s, a: s.rooms([a.room])
    ),
    "space-children": CatalogueQuery(
        "the children of a space", ("room",), lambda s, a: s.space_children(a.room)
    ),
    "membership": CatalogueQuery(
        "the membership of a user in a room", PAGED, lambda s, a: s.membership(a.room, a.user)
    ),
    "members": CatalogueQuery(
        "the events of the joined members of a room",
        ("room",),
        lambda s, a: s.members(a.room, membership="join"),
    ),
    "member-ids": CatalogueQuery(
        "the joined members of a room", ("room",), lambda s, a: s.member_ids(a.room)
    ),
    "users-sharing": CatalogueQuery(
        "the users who share a room", ("user",), lambda s, a: s.users_sharing(a.user)
    ),
    "sharing-changes": CatalogueQuery(
        "the users who share a room since a token", SYNCED, _sharing_changes
    ),
    "rooms-of": CatalogueQuery(
        "the rooms that a user is in", ("user",), lambda s, a: s.rooms_of(a.user)
    ),
    "visible-to-user": CatalogueQuery(
        "whether a user may see an event",
        ("user", "event"),
        lambda s, a: s.visible_to_user(a.user, [a.event]),
    ),
}
