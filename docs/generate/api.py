"""`reference/api/…`: one page for each subject, with directives for mkdocstrings."""

import inspect
from collections.abc import Iterator
from typing import Final, NamedTuple

import storage.federation
import storage.inspector
import storage.responses
import storage.testing
from docs.generate.markup import one_line, page, table
from storage.store.facade import Store


class Subject(NamedTuple):
    """A page: the calls of `Store` and the further names that it has."""

    name: str
    title: str
    said: str
    calls: tuple[str, ...] = ()
    names: tuple[str, ...] = ()


SUBJECTS: Final = (
    Subject(
        "opening",
        "Opening",
        "`storage.open` is an async context manager. It yields the `Store`, whose calls the other "
        "pages describe. Several stores may be open on one database, in one process or in many. "
        "[Configuration](../config.md) lists the fields of `Config`.",
        names=("open", "Store", "Config", "__version__"),
    ),
    Subject(
        "writing",
        "Writing",
        "A PDU is the received JSON, as bytes or as a dict. The bytes are stored as they are; a "
        "dict is encoded as canonical JSON first.",
        calls=(
            "append",
            "readmit",
            "erase_user",
            "restore_user",
        ),
        names=(
            "AppendResult",
            "SendResult",
            "persist.append.AppendOptions",
            "persist.model.results.Origin",
            "persist.model.results.Outcome",
            "persist.receive.Pdu",
            "persist.receive.VerifyKeys",
            "persist.receive.StrippedState",
        ),
    ),
    Subject(
        "sending",
        "Local events",
        "These calls make events of local users. The engine chooses parents, depth and auth "
        "events, and signs with the key of the server.",
        calls=(
            "create_room",
            "send",
            "template",
        ),
        names=("persist.send.InitialEvent",),
    ),
    Subject(
        "reading",
        "Reading",
        "These calls return events by id, and decide which of them a reader may see.",
        calls=(
            "event",
            "events",
            "visible_to_user",
            "visible_to_server",
            "explain_visibility",
        ),
        names=("StoredEvent",),
    ),
    Subject(
        "state",
        "State",
        "A state map is a dict from (type, state key) to the event id. The state before an event "
        "does not contain it, and the state after it does.",
        calls=(
            "state_before",
            "state_after",
            "states_before",
            "states_after",
            "current_state",
            "forward_extremities",
            "backward_extremities",
            "rooms_of",
        ),
    ),
    Subject(
        "rooms",
        "Rooms",
        "Descriptions of rooms from their current state, for lists and directories.",
        calls=(
            "rooms",
            "space_children",
        ),
        names=("RoomInfo", "SpaceChild"),
    ),
    Subject(
        "members",
        "Members",
        "The members of a room, the rooms of a user, and the servers and users to inform.",
        calls=(
            "membership",
            "member_ids",
            "members",
            "state_at_leave",
            "memberships_of",
            "forget",
            "joined_servers",
            "partial_rooms",
            "shared_rooms",
            "users_sharing",
            "sharing_changes",
        ),
        names=("PartialRoom", "SharingChanges"),
    ),
    Subject(
        "sync",
        "Sync",
        "The parts of the client-server API's /sync that are room events.",
        calls=(
            "sync",
            "unread",
            "positions_of",
        ),
        names=(
            "SyncFilter",
            "EventFilter",
            "Sync",
            "JoinedRoom",
            "InvitedRoom",
            "KnockedRoom",
            "LeftRoom",
            "Timeline",
            "RoomSummary",
            "Unread",
        ),
    ),
    Subject(
        "sliding-sync",
        "Sliding sync",
        "A part of the rooms of a user, as a client asks for it (MSC4186).",
        calls=("sliding_sync",),
        names=(
            "SlidingSyncRequest",
            "SlidingList",
            "SlidingFilter",
            "RoomSubscription",
            "SlidingSync",
            "SlidingListResult",
            "SlidingRoom",
            "Hero",
        ),
    ),
    Subject(
        "pages",
        "Pages",
        "History in topological order, what relates to an event, and events as clients get them.",
        calls=(
            "messages",
            "context",
            "relations",
            "aggregations",
            "threads",
            "event_near",
            "client_events",
        ),
        names=("Page", "Gap", "Context", "RelationsPage", "Aggregations", "ThreadSummary"),
    ),
    Subject(
        "responses",
        "Responses to clients",
        "`storage.responses` makes the JSON of the client-server API for what the store returns.",
        names=tuple(f"responses.{name}" for name in storage.responses.__all__),
    ),
    Subject(
        "federation",
        "Federation",
        "Responses to other servers. With a server name, events that the server may not see are "
        "redacted.",
        calls=(
            "is_resident",
            "backfill",
            "missing_events",
            "timestamp_to_event",
            "state_ids",
            "event_auth",
            "auth_chain_ids",
            "auth_chain_difference",
        ),
        names=("StateIds",),
    ),
    Subject(
        "receiving",
        "Receiving",
        "`Receiver` takes the events of other servers, and requests what is missing. "
        "[Receiving](../../internals/receiving.md) explains each step.",
        names=tuple(f"federation.{name}" for name in storage.federation.__all__),
    ),
    Subject(
        "gaps",
        "Gaps",
        "Places where history is missing, and when to request it again.",
        calls=(
            "gaps",
            "server_up",
            "gap_failed",
        ),
        names=("OpenGap",),
    ),
    Subject(
        "streams",
        "Streams",
        "`store.streams` maps names to streams. `store.account_data`, `store.to_device` and "
        "`store.receipts` store what clients send besides events. `store.notifier` waits for news. "
        "[Tokens](../tokens.md) describes positions and tokens.",
        names=(
            "streams.registry.Stream",
            "streams.account_data.AccountData",
            "streams.to_device.ToDevice",
            "streams.receipts.Receipts",
            "streams.notifier.Notifier",
            "streams.VectorPosition",
            "streams.SyncToken",
            "streams.PaginationToken",
            "streams.RoomsToken",
            "streams.IdGenerator",
            "streams.Reservation",
        ),
    ),
    Subject(
        "own-facts",
        "Your own facts",
        "Streams that the homeserver defines, the outbox of local events, and `store.cursors`. "
        "[Your own streams, the outbox and cursors](../../how-to/own-facts.md) shows them in use.",
        calls=(
            "define_stream",
            "stream",
            "outbox",
        ),
        names=(
            "streams.defined_streams.DefinedStream",
            "streams.published_facts.PublishedFact",
            "Outbox",
            "Outgoing",
            "streams.cursors.Cursors",
        ),
    ),
    Subject(
        "replication",
        "Replication",
        "Processes publish their commits to each other. [Replication](../replication.md) describes "
        "the lines.",
        names=(
            "replication.Server",
            "replication.Client",
            "replication.Handlers",
            "replication.ReplicationPeer",
            "replication.Hub",
            "replication.redis_transport.RedisTransport",
            "replication.commands.parse",
            "replication.server.server_context",
            "replication.server.client_context",
        ),
    ),
    Subject(
        "events",
        "Events",
        "Pure functions on PDUs: room versions, parsing, hashes, redaction and signatures.",
        names=tuple(f"event.{name}" for name in storage.event.__all__),
    ),
    Subject(
        "authorisation",
        "Authorisation and visibility",
        "Pure functions: the authorisation rules, state resolution, and the rule of history "
        "visibility.",
        names=(
            "auth.check",
            "auth.check_auth_events",
            "auth.keys_needed",
            "auth.auth_event_keys",
            "auth.redaction_allowed",
            "auth.resolve",
            "visibility.user_may_see",
            "visibility.server_may_see",
        ),
    ),
    Subject(
        "identifiers",
        "Identifiers",
        "Names for kinds of text, so that a type checker keeps them apart. At run time they are "
        "str.",
        names=("RoomId", "EventId", "UserId", "ServerName", "StateKey"),
    ),
    Subject(
        "maintenance",
        "Maintenance",
        "The functions behind the commands of an operator. They take the `Database` of a store, "
        "`store.database`.",
        names=(
            "maintenance.purge.purge_history",
            "maintenance.purge.purge_room",
            "maintenance.purge.purge_retention",
            "maintenance.purge.resume",
            "maintenance.purge.jobs",
            "maintenance.purge.Purged",
            "maintenance.purge.PurgeJob",
            "maintenance.censor.censor",
            "maintenance.censor.Censored",
            "maintenance.verify.verify",
            "maintenance.verify.Finding",
            "rebuild.rebuild",
            "rebuild.Rebuilt",
            "rebuild.repair_positions",
            "maintenance.state_group_gc.collect_all",
            "maintenance.state_group_gc.Collected",
            "database.migrate.migrate",
            "database.migrate.MigrationOptions",
        ),
    ),
    Subject(
        "observability",
        "Observability",
        "[Metrics](../metrics.md) lists the metrics.",
        names=(
            "observability.prometheus.expose",
            "observability.opentelemetry.enable",
        ),
    ),
    Subject(
        "inspector",
        "Inspector",
        "A web application that shows the rooms of a store. It needs the extra `inspector`. [Mount "
        "the inspector](../../how-to/mount-the-inspector.md) has an example.",
        names=tuple(f"inspector.{name}" for name in storage.inspector.__all__),
    ),
    Subject(
        "pipeline",
        "Spark",
        "Bulk work on Spark. It needs the extra `spark` and Java 17, and for a mirror the extra "
        "`lake`.",
        names=(
            "pipeline.RoomEvents",
            "pipeline.import_archive",
            "pipeline.ImportSummary",
            "pipeline.import_synapse",
            "pipeline.Synapse",
            "pipeline.export_parquet",
            "pipeline.Export",
            "pipeline.mirror",
            "pipeline.mirrored",
            "pipeline.answers",
            "pipeline.MirrorAnswer",
            "pipeline.Question",
            "pipeline.verify",
            "pipeline.rebuild",
            "pipeline.statistics",
            "pipeline.Statistics",
        ),
    ),
    Subject(
        "testing",
        "Testing",
        "Signed rooms for the tests of a homeserver.",
        names=tuple(f"testing.{name}" for name in storage.testing.__all__),
    ),
)


OPTIONS: Final = {
    "Store": """
    options:
      members: [measures]
      inherited_members: true""",
    "Config": """
    options:
      members: [from_env]""",
}
"""Names whose other members have pages of their own."""


def pages() -> dict[str, str]:
    """Return the pages by name."""
    return {subject.name: text(subject) for subject in SUBJECTS} | {"index": index()}


def text(subject: Subject) -> str:
    """Return the page of a subject."""
    listed = [*calls_of(subject), *subject.names]
    directives = [f"::: storage.{name}{OPTIONS.get(name, '')}" for name in listed]
    return page(f"# {subject.title}", subject.said, *directives)


def calls_of(subject: Subject) -> Iterator[str]:
    """Yield the calls of `Store` that belong to a subject, as `Store.…`."""
    yield from (f"Store.{name}" for name in subject.calls)


def calls() -> list[str]:
    """Return the calls of `Store`, in its order."""
    return [name for name in vars(Store) if not name.startswith("_")]


def index() -> str:
    """Return the overview: each call in a sentence."""
    subjects = [
        [f"[{one.title}]({one.name}.md)", one.said.split(". ")[0].rstrip(".") + "."]
        for one in SUBJECTS
    ]
    rows = [
        [f"[`{name}`][storage.Store.{name}]", _sentence(getattr(Store, name))] for name in calls()
    ]
    return page(
        "# API",
        "Everything that does I/O is a coroutine. Ids are text, and times are milliseconds since "
        "1970, UTC. Results are frozen. Names that a page does not have are no part of the API.",
        table(["Page", "Subject"], subjects),
        f"## Calls of a store\n\n{table(['Call', 'Purpose'], rows)}",
    )


def _sentence(call: object) -> str:
    first = one_line((inspect.getdoc(call) or "").split("\n\n")[0])
    return first.split(". ")[0].rstrip(".") + "."
