"""Events in the form that the client-server API serves.

Client-server API, "Room event format": `ClientEvent`. The keys and ``unsigned`` are built here.
Nothing of the sender's own ``unsigned`` is in them. A page takes one statement if the reader was
joined at all its events (client_page.py). Another statement has the facts of the other events, of
state events, and of events that the reader's device may have sent (client_facts.py).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from storage.database.connection import Connection
from storage.event import redact
from storage.event.versions import version_of
from storage.ids import EventId, UserId
from storage.queries.client_facts import ClientFacts, client_facts
from storage.queries.client_page import client_page
from storage.queries.events import Aggregations, StoredEvent, size_of
from storage.turns import in_turns

REDACTION: Final = "m.room.redaction"
Facts = Mapping[EventId, ClientFacts]
Bundles = Mapping[EventId, Aggregations]


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """The reader, and the form.

    ``with_room_id`` False leaves the room id out, as /sync does. ``now_ms`` is the time from which
    ``age`` counts.
    """

    user_id: UserId
    device_id: str | None = None
    ignored: list[UserId] | None = None
    with_room_id: bool = True
    now_ms: int = 0


async def client_events(
    conn: Connection, request: ClientRequest, events: Sequence[StoredEvent]
) -> list[dict[str, Any]]:
    """Return those of the events that the reader may get, in the same order."""
    messages = [event async for event in in_turns(events, size_of) if event.state_key is None]
    bundles: Bundles = {}
    facts: dict[EventId, ClientFacts] = {}
    if messages:
        page = await client_page(
            conn,
            request.user_id,
            messages,
            ignored=request.ignored,
            has_device=request.device_id is not None,
        )
        bundles, facts = page.bundles, page.facts
    listed = [event.event_id for event in (*events, *_bundled(bundles.values()))]
    unknown = {event_id for event_id in listed if event_id not in facts}
    if unknown:
        facts |= await client_facts(conn, request.user_id, unknown, request.device_id)
    shown = [event for event in events if _is_shown(event, facts)]
    return [
        _with_relations(request, event, facts, bundles.get(event.event_id))
        async for event in in_turns(shown)
    ]


async def client_state(
    conn: Connection, request: ClientRequest, events: Sequence[StoredEvent]
) -> list[dict[str, Any]]:
    """Return the events of a state that the reader may have, in the same order.

    It reads nothing but the redactions, and the transactions of the reader's own events.
    """
    wanted = [
        event.event_id
        async for event in in_turns(events, size_of)
        if event.redacted_by or (request.device_id and event.sender == request.user_id)
    ]
    facts: Facts = {}
    if wanted:
        facts = await client_facts(conn, request.user_id, wanted, request.device_id)
    nothing = ClientFacts(is_shown=True, is_whole=True, membership=None, transaction_id=None)
    found: list[dict[str, Any]] = []
    async for event in in_turns(events, size_of):
        one = facts.get(event.event_id, nothing)
        known = ClientFacts(True, True, None, one.transaction_id, one.redaction)
        found.append(_form(request, event, known))
    return found


def _bundled(bundles: Iterable[Aggregations]) -> Iterator[StoredEvent]:
    for bundle in bundles:
        if bundle.replacement is not None:
            yield bundle.replacement
        if bundle.thread is not None:
            latest = bundle.thread.latest_event
            yield latest
            if latest.relations is not None:
                yield from _bundled([latest.relations])


def _is_shown(event: StoredEvent, facts: Facts) -> bool:
    one = facts.get(event.event_id)
    return one is not None and one.is_shown


def _with_relations(
    request: ClientRequest, event: StoredEvent, facts: Facts, bundle: Aggregations | None
) -> dict[str, Any]:
    """Return an event with its aggregations, whose events are in the same form."""
    shown = _form(request, event, facts[event.event_id])
    if bundle is not None:
        relations = bundle.bundle(lambda one: _with_relations(request, one, facts, one.relations))
        if relations:
            shown["unsigned"]["m.relations"] = relations
    return shown


def _form(request: ClientRequest, event: StoredEvent, facts: ClientFacts) -> dict[str, Any]:
    """Return an event without aggregations."""
    json = _served(event, facts)
    shown = {
        "event_id": event.event_id,
        "type": json["type"],
        "sender": json["sender"],
        "origin_server_ts": json["origin_server_ts"],
        "content": json["content"],
        "unsigned": _unsigned(request, event.event_id, json, facts),
    }
    if request.with_room_id:
        shown["room_id"] = event.room_id
    if "state_key" in json:
        shown["state_key"] = json["state_key"]
    if json["type"] == REDACTION:
        _add_target(shown, json, event.room_version)
    return shown


def _served(event: StoredEvent, facts: ClientFacts) -> dict[str, Any]:
    """Return the whole event, or the redacted form."""
    is_redacted = facts.redaction is not None or event.redacted_by is not None
    hides = is_redacted or not facts.is_whole
    return redact(event.json, event.room_version) if hides and not event.pruned else event.json


def _unsigned(
    request: ClientRequest, event_id: EventId, json: Mapping[str, Any], facts: ClientFacts
) -> dict[str, Any]:
    unsigned: dict[str, Any] = {"age": request.now_ms - json["origin_server_ts"]}
    if facts.membership is not None:
        unsigned["membership"] = facts.membership
    if facts.transaction_id is not None:
        unsigned["transaction_id"] = facts.transaction_id
    if facts.replaced is not None:
        unsigned["replaces_state"] = facts.replaced.event_id
        unsigned["prev_content"] = facts.replaced.content
        unsigned["prev_sender"] = facts.replaced.sender
    if facts.redaction is not None:
        unsigned["redacted_because"] = because = _form(request, *facts.redaction)
        if facts.redaction[0].withheld:  # older room versions take the target away, too
            because |= {"redacts": event_id, "content": {"redacts": event_id}}
    return unsigned


def _add_target(shown: dict[str, Any], json: Mapping[str, Any], room_version: str) -> None:
    """Write the target of a redaction at both places, where clients of any age look for it."""
    in_content = version_of(room_version).redacts_in_content
    target = (json["content"] if in_content else json).get("redacts")
    if isinstance(target, str):
        shown["redacts"] = target
        shown["content"] = {**json["content"], "redacts": target}
