"""Adding one event to a graph: state of its parents, auth events, bytes, and a check."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypedDict

from storage.auth import check, keys_needed
from storage.errors import AuthDenied
from storage.event import parse
from storage.ids import EventId, RoomId, StateKey
from storage.testing.drafting import (
    CREATE,
    Damage,
    EventDraft,
    auth_keys,
    depth_max,
    finish,
    number_of,
    old_event_id,
    reference_hash_text,
    server_of,
    unsigned_pdu,
)
from storage.testing.graph import RoomGraph
from storage.testing.merging import merge
from storage.testing.model import BuiltEvent, Expected, Merged, State

Reference: TypeAlias = BuiltEvent | str
"""An event or its id."""

FIRST_TIMESTAMP_MS: Final = 1_700_000_000_000
STEP_MS: Final = 1_000
SEEDS: Final = 1_000_000_000
"""Seeds with different first timestamps: 11 days of milliseconds."""


def first_ms(seed: int) -> int:
    """Return the first timestamp of a room.

    It depends on the seed, so that rooms of version 12, named by their create event, differ.
    """
    return FIRST_TIMESTAMP_MS + seed % SEEDS


class EventOptions(TypedDict, total=False):
    """The keyword arguments of every verb of the builder."""

    prev: Iterable[Reference]
    """The parents, instead of the heads."""
    auth: Iterable[Reference]
    """The auth events, instead of those that the rules select."""
    depth: int
    """A claim, instead of 1 + the parents' largest."""
    ts: int
    """origin_server_ts in milliseconds, instead of one second more with each event."""
    extra: Mapping[str, Any]
    """Top-level keys to add or replace."""
    signers: Sequence[str]
    """The servers that sign, instead of those that must."""
    expected: Expected
    """The expected outcome; a rejected, soft-failed or invalid event is no head."""
    damage: Damage
    """Break the content hash or the signatures, or make it larger than 65,536 bytes."""


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of all events of a room."""

    version: str
    servers: tuple[str, ...]
    seed: int
    sign: bool
    checked: bool
    exact: bool


@dataclass(frozen=True, slots=True)
class Request:
    """A requested event: its own parts, and its options."""

    sender: str
    type: str
    content: Mapping[str, Any]
    state_key: str | None
    redacts: str | None
    parents: tuple[EventId, ...]
    how: EventOptions


def id_of(reference: Reference) -> EventId:
    return reference.event_id if isinstance(reference, BuiltEvent) else EventId(reference)


def build(graph: RoomGraph, settings: Settings, request: Request) -> BuiltEvent:
    """Build the event and add it to the graph.

    Raise ValueError if the settings say `checked` and the event's own state contradicts the
    expected outcome.
    """
    merged = merge(graph, request.parents, exact=settings.exact)
    draft = _draft(graph, settings, request, merged.state)
    node = _node(graph, draft, request, merged, _encoded(graph, settings, draft, request.how))
    if settings.checked:
        _check(graph, node, auth_is_given="auth" in request.how)
    graph.add(node, draft.content)
    if number_of(settings.version) <= 2:
        graph.reference_hashes[node.event_id] = reference_hash_text(node.json, settings.version)
    if merged.disputed:
        graph.resolution_changes[node.event_id] = merged.disputed
    return node


def _draft(graph: RoomGraph, settings: Settings, request: Request, state: State) -> EventDraft:
    how = request.how
    cited = how.get("auth")
    return EventDraft(
        room_version=settings.version,
        room_id=graph.room_id,
        type=request.type,
        sender=request.sender,
        content=request.content,
        state_key=request.state_key,
        prev_events=request.parents,
        auth_events=_selected_auth(settings, request, state)
        if cited is None
        else tuple(id_of(event) for event in cited),
        depth=how["depth"] if "depth" in how else _honest_depth(graph, settings, request.parents),
        origin_server_ts=how["ts"]
        if "ts" in how
        else first_ms(settings.seed) + STEP_MS * graph.count,
        redacts=request.redacts,
        extra=how.get("extra", {}),
    )


def _selected_auth(settings: Settings, request: Request, state: State) -> tuple[EventId, ...]:
    keys = auth_keys(
        settings.version, request.type, request.sender, request.state_key, request.content
    )
    return tuple(state[key] for key in keys if key in state)


def _honest_depth(graph: RoomGraph, settings: Settings, parents: Sequence[EventId]) -> int:
    """Return the depth as servers compute it.

    A parent's false depth is carried on, up to the largest number.
    """
    return min(
        1 + max((graph.nodes[parent].depth for parent in parents), default=0),
        depth_max(settings.version),
    )


def _encoded(
    graph: RoomGraph, settings: Settings, draft: EventDraft, how: EventOptions
) -> tuple[bytes, EventId]:
    chosen = (
        old_event_id(settings.seed, graph.count, server_of(draft.sender))
        if number_of(settings.version) <= 2
        else None
    )
    pdu = unsigned_pdu(draft, graph.reference_hashes, chosen)
    names = how["signers"] if "signers" in how else _required_signers(draft)
    return finish(pdu, settings.version, names if settings.sign else (), how.get("damage"))


def _required_signers(draft: EventDraft) -> list[str]:
    names = [server_of(draft.sender)]
    authoriser = draft.content.get("join_authorised_via_users_server")
    if (
        isinstance(authoriser, str)
        and number_of(draft.room_version) >= 8
        and draft.type == "m.room.member"
    ):
        names.append(server_of(authoriser))
    return list(dict.fromkeys(names))


def _node(
    graph: RoomGraph,
    draft: EventDraft,
    request: Request,
    merged: Merged,
    encoded: tuple[bytes, EventId],
) -> BuiltEvent:
    pdu, event_id = encoded
    expected = request.how.get("expected") or _expected_of(request.how.get("damage"))
    state, key = merged.state, draft.state_key
    applied = key is not None and expected not in ("rejected", "invalid")
    return BuiltEvent(
        event_id=event_id,
        room_id=_room_id(draft, event_id),
        room_version=draft.room_version,
        pdu=pdu,
        type=draft.type,
        sender=draft.sender,
        state_key=key,
        prev_events=draft.prev_events,
        auth_events=draft.auth_events,
        depth=draft.depth,
        topological=1
        + max((graph.nodes[parent].topological for parent in draft.prev_events), default=0),
        origin_server_ts=draft.origin_server_ts,
        state_before=state,
        state_after=state.update({(draft.type, str(key)): event_id}) if applied else state,
        expected=expected,
    )


def _expected_of(damage: Damage | None) -> Expected | None:
    if damage is None:
        return None
    return "redacted" if damage == "content_hash" else "invalid"


def _room_id(draft: EventDraft, event_id: EventId) -> RoomId:
    if draft.room_id is None:
        return RoomId("!" + event_id[1:])
    return RoomId(draft.room_id)


def _check(graph: RoomGraph, node: BuiltEvent, *, auth_is_given: bool) -> None:
    """Raise ValueError if `expected` contradicts the auth rules on the state before the event."""
    if node.expected == "invalid":
        return
    event = parse(node.pdu, node.room_version)
    wanted: set[StateKey] = {*keys_needed(event), CREATE}
    auth_state = {
        key: graph.parsed(node.state_before[key]) for key in wanted if key in node.state_before
    }
    try:
        check(event, auth_state, node.room_version)
    except AuthDenied as denied:
        if node.expected != "rejected":
            raise ValueError(
                f"{node.type} by {node.sender} would be rejected ({denied}); "
                "say expected='rejected' if meant"
            ) from denied
    else:
        if node.expected == "rejected" and not auth_is_given:
            raise ValueError(
                f"{node.type} by {node.sender} would not be rejected: its state before it allows it"
            )
