"""The columns of the tables that the write fills: declared once, in the order of the schema.

Statements take their lists of columns, the types of their parameters and the order of their
arguments from here (`storage.database.placeholders`). A test compares the declaration with the
catalogue. docs/how-to/add-a-column.md names the other files that a new column touches.
"""

from collections.abc import Collection, Sequence
from typing import Final

from storage.database.placeholders import ColumnList, InputRows, LoadedColumns, SharedCondition


class Table:
    """A table: its name, its primary key, and its columns with their Postgres types."""

    def __init__(self, table: str, key: tuple[str, ...], /, **types: str) -> None:
        self.table = table
        self.key = key
        self.types = types

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.types)

    def but(self, *left_out: str) -> tuple[str, ...]:
        self._check_columns(left_out)
        return tuple(column for column in self.types if column not in left_out)

    def chosen(self, name: str, columns: Sequence[str] | None = None) -> ColumnList:
        """Return some columns, or all, for the placeholders of a statement."""
        columns = self.columns if columns is None else columns
        self._check_columns(columns)
        return ColumnList(name, tuple(columns), frozenset(self.key))

    def loaded(self, name: str, columns: Sequence[str]) -> LoadedColumns:
        """Return some columns as a load returns them, for the placeholders of a statement."""
        chosen = self.chosen(name, columns)
        functions = {column: COMPUTED[column] for column in chosen.columns if column in COMPUTED}
        return LoadedColumns(name, chosen.columns, chosen.key, functions)

    def rows(self, name: str, columns: Sequence[str] | None = None, /, **own: str) -> InputRows:
        """Return input rows with some columns, or all, and with ``own`` columns after them."""
        chosen = self.chosen(name, columns)
        types = {column: self.types[column] for column in chosen.columns}
        return InputRows(name, chosen.columns, chosen.key, types | own)

    def _check_columns(self, columns: Collection[str]) -> None:
        if unknown := [column for column in columns if column not in self.types]:
            raise ValueError(f"{self.table} has no columns {unknown}")


PRINCIPALS: Final = Table("principals", ("principal_nid",), principal_nid="int", name="text")

EVENT_TYPES: Final = Table("event_types", ("type_nid",), type_nid="int", type="text")

STATE_KEYS: Final = Table(
    "state_keys", ("state_key_nid",), state_key_nid="int", type_nid="int", state_key="text"
)

ROOMS: Final = Table(
    "rooms",
    ("room_nid",),
    write_version="bigint",
    room_nid="int",
    next_audience="bigint",
    current_state_group="bigint",
    last_stream_ordering="bigint",
    max_topological_ordering="bigint",
    current_audience="bigint",
    moves="bigint",
    removals="bigint",
    joined_count="int",
    invited_count="int",
    room_id="text",
    room_version="text",
    forward_extremities="bigint[]",
    out_of_range="int8multirange",
    is_partial="boolean",
    completed_at="bigint",
    in_order_ts="bigint",
)

EVENTS: Final = Table(
    "events",
    ("event_nid",),
    event_nid="bigint",
    stream_ordering="bigint",
    topological_ordering="bigint",
    depth="bigint",
    origin_server_ts="bigint",
    received_ts="bigint",
    state_group_before="bigint",
    state_group_after="bigint",
    audience="bigint",
    redacted_by="bigint",
    relates_to="bigint",
    room_nid="int",
    sender_nid="int",
    type_nid="int",
    state_key_nid="int",
    rel_type_nid="int",
    encoding="smallint",
    writer_nid="smallint",
    membership="smallint",
    outlier="boolean",
    backfilled="boolean",
    soft_failed="boolean",
    redacted_form="boolean",
    ineffective="boolean",
    replaces="boolean",
    has_url="boolean",
    after_gap="boolean",
    event_id="text",
    rejected="text",
    prev_events="bigint[]",
    auth_events="bigint[]",
    json="bytea",
    arrival_ordering="bigint",
    superseded="boolean",
    refused="text",
    prev_distance="int",
    auth_distance_1="int",
    auth_distance_2="int",
    auth_distance_3="int",
    auth_distance_4="int",
    describes_room="boolean",
    in_order_ts="bigint",
)

CLAIMED_DEPTH: Final = ColumnList("claimed_depth", ("depth", "topological_ordering"))
"""The function of the schema that reads the depth of an event, and the columns that it takes."""

REDACTION_EFFECTS: Final = ("ineffective", "redacted_by")
"""The columns of `events` that say what redactions do."""

PREV_NIDS: Final = ColumnList("prev_nids", ("event_nid", "prev_events", "prev_distance"))
AUTH_NIDS: Final = ColumnList(
    "auth_nids",
    (
        "event_nid",
        "auth_events",
        "auth_distance_1",
        "auth_distance_2",
        "auth_distance_3",
        "auth_distance_4",
    ),
)
"""The functions of the schema that read the edges of an event, and the columns that they take.

A statement calls them by `:prev_nids.call(e)`. `storage.persist.write.events` writes these
columns."""

COMPUTED: Final = {"depth": CLAIMED_DEPTH, "prev_events": PREV_NIDS, "auth_events": AUTH_NIDS}

REORDERED_EVENTS: Final = Table(
    "reordered_events",
    ("room_nid", "moves", "event_nid"),
    moves="bigint",
    event_nid="bigint",
    topological_before="bigint",
    room_nid="int",
)

MISSING_EVENTS: Final = Table(
    "missing_events",
    ("event_nid",),
    event_nid="bigint",
    room_nid="int",
    superseded="boolean",
    event_id="text",
    child_nids="bigint[]",
)

DROPPED_EXTREMITIES: Final = Table(
    "dropped_extremities", ("room_nid", "event_nid"), event_nid="bigint", room_nid="int"
)

WAITING_REDACTIONS: Final = Table(
    "waiting_redactions",
    ("redaction_nid",),
    redaction_nid="bigint",
    room_nid="int",
    target_event_id="text",
)

STATE_GROUPS: Final = Table(
    "state_groups",
    ("state_group",),
    state_group="bigint",
    digest="bigint",
    audience="bigint",
    room_nid="int",
    entry_count="int",
    runs="int",
    back="int[]",
    key_nids="int[]",
    event_nids="bigint[]",
    member_key_nids="int[]",
    member_event_nids="bigint[]",
    key_nid="int",
    member_key_nid="int",
    event_nid="bigint",
    path="bytea",
)

OWN_ENTRIES: Final = ColumnList(
    "own_entries",
    (
        "key_nids",
        "event_nids",
        "member_key_nids",
        "member_event_nids",
        "key_nid",
        "member_key_nid",
        "event_nid",
    ),
)
OWN_OTHERS: Final = ColumnList("own_others", ("key_nids", "event_nids", "key_nid", "event_nid"))
"""The functions of the schema that read the entries of a row, and the columns that they take.

`own_entry` takes a key, whether it is a member's, and the columns of `own_entries`."""

USER_SEES: Final = ColumnList(
    "user_sees",
    (
        "joined_since",
        "own_audiences",
        "shared_audiences",
        "world_audiences",
        "shared_before",
        "reader_nid",
        "unread",
    ),
)
"""The columns of `visibility_of` that `user_sees` takes after the event."""

_WAS_THERE: Final = (
    "was_there(e, {row}.joined_since, {row}.joined_audiences)",
    "EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)",
    "was_there_before(e, {row}.reader_nid, {row}.unread)",
)
WITHHELD: Final = SharedCondition(
    "withheld", (), condition="NOT {} AND {} AND NOT {}".format(*_WAS_THERE)
)
"""Whether the reader gets the event `e` in its redacted form, as its sender is erased."""
WHOLE: Final = SharedCondition("whole", (), condition="({} OR NOT {} OR {})".format(*_WAS_THERE))
"""The contrary."""

CURRENT_STATE: Final = Table(
    "current_state",
    ("room_nid", "state_key_nid"),
    event_nid="bigint",
    room_nid="int",
    state_key_nid="int",
    membership="smallint",
)

STATE_DELTAS: Final = Table(
    "state_deltas",
    ("room_nid", "stream_ordering", "state_key_nid"),
    stream_ordering="bigint",
    event_nid="bigint",
    prev_event_nid="bigint",
    room_nid="int",
    state_key_nid="int",
    writer_nid="smallint",
)

MEMBERSHIPS: Final = Table(
    "memberships",
    ("principal_nid", "room_nid"),
    stream_ordering="bigint",
    event_nid="bigint",
    principal_nid="int",
    room_nid="int",
    writer_nid="smallint",
    membership="smallint",
    forgotten="boolean",
)

OUTLIER_MEMBERSHIPS: Final = Table(
    "outlier_memberships",
    ("stream_id",),
    stream_id="bigint",
    event_nid="bigint",
    writer_nid="smallint",
)

OUT_OF_BAND_MEMBERSHIPS: Final = Table(
    "out_of_band_memberships",
    ("room_nid", "principal_nid"),
    event_nid="bigint",
    room_nid="int",
    principal_nid="int",
    stripped_state="text",
)

LOCAL_TRANSACTIONS: Final = Table(
    "local_transactions",
    ("room_nid", "sender_nid", "device_id", "transaction_id"),
    event_nid="bigint",
    sent_ts="bigint",
    room_nid="int",
    sender_nid="int",
    device_id="text",
    transaction_id="text",
    event_id="text",
)

AUTH_CHAINS: Final = Table(
    "auth_chains",
    ("event_nid",),
    event_nid="bigint",
    chain_nid="bigint",
    sequence_number="int",
    event_id="text",
    state_key="text",
    link_1="bigint",
    link_2="bigint",
)

AUTH_CHAIN_LINKS: Final = Table(
    "auth_chain_links",
    ("chain_nid", "sequence_number", "target_chain_nid"),
    chain_nid="bigint",
    target_chain_nid="bigint",
    sequence_number="int",
    target_sequence_number="int",
)

VISIBILITY: Final = Table(
    "visibility",
    ("room_nid", "principal_nid"),
    last_join_topological="bigint",
    room_nid="int",
    principal_nid="int",
    joined_count="int",
    invited_count="int",
    audiences="int8multirange",
    invited_audiences="int8multirange",
    first_audience="bigint",
)

PAST_VISIBILITY: Final = Table(
    "past_visibility",
    ("room_nid", "principal_nid", "first_audience"),
    first_audience="bigint",
    opened_topological="bigint",
    room_nid="int",
    principal_nid="int",
    audiences="int8multirange",
    invited_audiences="int8multirange",
    topological_ranges="int8multirange",
)

AUDIENCES: Final = Table(
    "audiences",
    ("room_nid", "audience"),
    audience="bigint",
    opened_topological="bigint",
    room_nid="int",
    branches="int",
    continued="boolean",
)

CACHE_INVALIDATIONS: Final = Table(
    "cache_invalidations",
    ("stream_id",),
    stream_id="bigint",
    invalidation_ts="bigint",
    writer_nid="smallint",
    cache_name="text",
    keys="text[]",
)
