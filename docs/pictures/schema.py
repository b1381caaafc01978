"""The tables in six clusters, and the columns that connect them."""

from typing import Final, NamedTuple

from docs.pictures.canvas import AMBER, BLUE, GREY, MUTED, RED, TEAL, VIOLET, Box, Canvas, Tone

ROW: Final = 46
TABLE: Final = (258, 40)


class Cluster(NamedTuple):
    """Tables that belong together, each with the columns that say most about it."""

    title: str
    tone: Tone
    tables: dict[str, str]


NAMES: Final = Cluster(
    "Names and upkeep",
    GREY,
    {
        "principals": "principal_nid, name",
        "event_types": "type_nid, type",
        "state_keys": "state_key_nid, type_nid, state_key",
        "deployment": "deployment_id, server_name",
        "schema_compatibility": "code_revision",
        "background_jobs": "name, place, rows_done",
        "purge_jobs": "job_id, room_nid, phase",
        "purge_retained_events": "room_nid, event_nid",
        "import_events": "import_number, place, json",
    },
)
EVENTS: Final = Cluster(
    "Rooms and events",
    TEAL,
    {
        "rooms": "room_nid, room_id, current_state_group",
        "events": "event_nid, event_id, json, …",
        "missing_events": "event_nid, event_id, child_nids",
        "gap_failures": "event_nid, retry_ts",
        "reordered_events": "event_nid, topological_before",
        "dropped_extremities": "room_nid, event_nid",
        "waiting_redactions": "redaction_nid, target_event_id",
        "local_transactions": "transaction_id, event_nid",
    },
)
STATE: Final = Cluster(
    "State and auth chains",
    BLUE,
    {
        "current_state": "room_nid, state_key_nid, event_nid",
        "state_groups": "state_group, path, key_nid, event_nid",
        "state_deltas": "stream_ordering, state_key_nid",
        "partial_rooms": "room_nid, join_event_id, servers",
        "memberships": "principal_nid, room_nid",
        "outlier_memberships": "stream_id, event_nid",
        "out_of_band_memberships": "room_nid, stripped_state",
        "auth_chains": "event_nid, chain_nid, link_1",
        "auth_chain_links": "chain_nid, target_chain_nid",
    },
)
STREAMS: Final = Cluster(
    "Streams",
    AMBER,
    {
        "stream_positions": "stream_name, instance_name",
        "writers": "writer_nid, instance_name",
        "cache_invalidations": "stream_id, cache_name, keys",
        "purged_streams": "stream_name, purged_upto",
        "lost_positions": "lost_after, lost_upto",
        "account_data": "principal_nid, type_nid",
        "to_device": "principal_nid, device_id",
        "receipts": "room_nid, receipt_type",
        "defined_streams": "stream_name",
        "published_facts": "stream_id, key, value",
        "cursors": "name, position",
        "sliding_connections": "connection_nid, conn_id",
        "sliding_rooms": "connection_nid, room_nid",
    },
)
VISIBILITY: Final = Cluster(
    "Visibility",
    VIOLET,
    {
        "audiences": "room_nid, audience",
        "visibility": "principal_nid, audiences",
        "past_visibility": "principal_nid, audiences",
        "erased_users": "principal_nid, erased_ts",
    },
)
BYTES: Final = Cluster(
    "Stored bytes",
    TEAL,
    {
        "dictionaries": "dictionary_id, data",
        "archive_packs": "pack, url, state",
        "archive_garbage": "pack, record_offset",
    },
)
CLUSTERS: Final = (NAMES, EVENTS, STATE, STREAMS, VISIBILITY, BYTES)


def draw() -> Canvas:
    """Return the ER diagram: a frame for each cluster, arrows along the references between them."""
    canvas = Canvas(1000, 995, "The tables of the schema, in six clusters")
    names = _cluster(canvas, NAMES, 20, 20)
    events = _cluster(canvas, EVENTS, 361, 20)
    state = _cluster(canvas, STATE, 702, 20)
    _cluster(canvas, STREAMS, 20, 560, columns=2)
    visibility = _cluster(canvas, VISIBILITY, 702, 560)
    _cluster(canvas, BYTES, 702, 800)
    _reference(canvas, events["events"], names["event_types"], "sender, type")
    _reference(canvas, events["events"], state["state_groups"], "state")
    _reference(canvas, events["rooms"], state["current_state"])
    _between(canvas, events["events"], visibility["audiences"], "audience")
    start = events["events"].x + 40, 376 + 20
    canvas.arrow(start, (start[0], 556), colour=TEAL.stroke)
    canvas.text(start[0] + 10, 470, "stream_ordering: of which writer,", size=12.5, fill=MUTED)
    canvas.text(start[0] + 10, 487, "up to which position", size=12.5, fill=MUTED)
    return canvas


def _cluster(
    canvas: Canvas, cluster: Cluster, x: float, y: float, columns: int = 1
) -> dict[str, Box]:
    width, height = TABLE
    rows = -(-len(cluster.tables) // columns)
    canvas.frame(x, y, columns * (width + 20), rows * ROW + 36, cluster.title, cluster.tone)
    return {
        name: canvas.box(
            x + 10 + (number // rows) * (width + 20),
            y + 32 + (number % rows) * ROW,
            width,
            height,
            name,
            [shown],
            tone=cluster.tone,
        )
        for number, (name, shown) in enumerate(cluster.tables.items())
    }


def _reference(canvas: Canvas, source: Box, target: Box, *label: str) -> None:
    """Draw an arrow between neighbouring columns."""
    rightwards = source.x < target.x
    start, end = (source.right, target.left) if rightwards else (source.left, target.right)
    canvas.arrow(start, (end[0] + (-8 if rightwards else 8), end[1]), colour=RED.stroke)
    for number, line in enumerate(label):
        middle = (start[0] + end[0]) / 2
        canvas.text(middle, start[1] - 6 + 14 * number, line, size=11, anchor="middle", fill=MUTED)


def _between(canvas: Canvas, source: Box, target: Box, label: str) -> None:
    """Draw an arrow through the gap between two columns, to a cluster further down."""
    start, end = source.right, target.left
    middle = start[0] + 24
    bend = start[1] + 12
    canvas.arrow(
        (start[0], bend), (middle, bend), (middle, end[1]), (end[0] - 8, end[1]), colour=RED.stroke
    )
    canvas.text(middle - 6, end[1] - 30, label, size=12, anchor="end", fill=MUTED)
