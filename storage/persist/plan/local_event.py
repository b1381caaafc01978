"""Build an event of a local user in the plan, on the room as it is there, and plan it.

Its parents are all forward extremities of the room, so it leaves one. The state before it is then
the room's current state. Its auth events and its authorisation are by that state. If another writer
changes the room first, the write is refused, and the event is built and signed again.

A refused event adds nothing to the plan. Source: server-server API, "PDUs" and "Auth events
selection".
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from storage.auth import auth_event_keys, check, keys_needed
from storage.auth.level_lookup import PowerLevels
from storage.errors import AuthDenied, InvalidEvent, UnknownRoom
from storage.event import Event, parse, sign
from storage.event.building import Citation, EventTemplate, cite, outline, unsigned_event
from storage.event.parsing import MAX_PREV_EVENTS
from storage.event.versions import RoomVersion, version_of
from storage.ids import EventId, StateKey
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.incoming import AnyEvent, IncomingEvent, Readmission
from storage.persist.model.local_event import LocalEvent
from storage.persist.model.results import AppendResult, invalid
from storage.persist.model.row_changes import RoomChanges
from storage.persist.model.rows import EventRow
from storage.persist.plan.auth_checks import auth_state
from storage.persist.plan.event import plan_event
from storage.persist.plan.readmission import plan_readmission
from storage.persist.plan.restricted_join import with_authoriser

REDACTION: Final = "m.room.redaction"


class Ancestry(NamedTuple):
    """Parents and auth events of a new event, and its depth."""

    prev_events: list[Citation]
    auth_events: list[Citation]
    depth: int


def plan_any(change_set: ChangeSet, incoming: AnyEvent) -> AppendResult:
    """Plan a received event, build and plan a local one, or readmit one."""
    if isinstance(incoming, IncomingEvent):
        return plan_event(change_set, incoming)
    if isinstance(incoming, Readmission):
        return plan_readmission(change_set, incoming)
    return plan_local(change_set, incoming)


def plan_local(change_set: ChangeSet, local: LocalEvent) -> AppendResult:
    """Build an event and add its rows; on `MissingData` nothing was added.

    If it cannot be built, the result has no event id, and nothing was added: "rejected" with the
    auth rule, "invalid", or "missing_parents" for an unknown room. A repeated request adds nothing
    either: the result is a "duplicate" with the id of the first event.
    """
    transaction = local.transaction
    first = None if transaction is None else change_set.transactions.first_event(transaction)
    if first is not None:
        return AppendResult(first, "duplicate")
    try:
        version = _version_of(change_set, local.template)
        template = completed(change_set, local.template, version)
        ancestry = ancestry_of(change_set, template, version)
        event = _signed(local, template, version, ancestry)
    except AuthDenied as error:
        return AppendResult(None, "rejected", f"{error.rule}: {error.reason}")
    except InvalidEvent as error:
        return invalid(error, None)
    except UnknownRoom as error:
        return AppendResult(None, "missing_parents", str(error))
    # nobody else can have seen an event whose id is a hash of what is signed here
    change_set.events.assume_new([event.event_id])
    result = plan_event(change_set, IncomingEvent(event, "live"))
    row = change_set.events.rows.get(event.event_id)
    if transaction is not None and row is not None:
        change_set.transactions.add(transaction, row)
    return result


def template_of(change_set: ChangeSet, template: EventTemplate) -> dict[str, Any]:
    """Return an event as `plan_local` would build it, neither signed nor planned.

    Raise `AuthDenied`, `UnknownRoom`, or `MissingData`.
    """
    version = _version_of(change_set, template)
    template = completed(change_set, template, version)
    ancestry = ancestry_of(change_set, template, version)
    return unsigned_event(template, version, **ancestry._asdict())


def _version_of(change_set: ChangeSet, template: EventTemplate) -> RoomVersion:
    return version_of(_room(change_set, template).row.room_version)


def _room(change_set: ChangeSet, template: EventTemplate) -> RoomChanges:
    room_id = template.room_id or ""
    known = change_set.rooms.room_changes.get(room_id)
    if known is not None:
        return known
    row = change_set.rooms.room(room_id)
    if row is None or not row.write_version:
        raise UnknownRoom(room_id)
    return RoomChanges.of(row)


def completed(
    change_set: ChangeSet, template: EventTemplate, version: RoomVersion
) -> EventTemplate:
    """Return the parts of an event, with those of its content that the engine chooses."""
    return with_authoriser(change_set, _room(change_set, template), template, version)


def ancestry_of(change_set: ChangeSet, template: EventTemplate, version: RoomVersion) -> Ancestry:
    """Return what a new event stands on. Raise `AuthDenied` if the current state refuses it."""
    room = _room(change_set, template)
    probe = outline(template, version)
    state = _state(change_set, room, probe)
    check(probe, state, version)
    if probe.type == REDACTION:
        _check_redaction(change_set, room, probe, state)
    rows = _parents(change_set, room)
    return Ancestry(
        _cited(change_set, rows, version),
        [cite(state[key]) for key in sorted(auth_event_keys(probe)) if key in state],
        1 + max((row.depth for row in rows), default=0),
    )


def _state(change_set: ChangeSet, room: RoomChanges, probe: Event) -> dict[StateKey, Event]:
    """Return the part of the current state that the auth check of the event reads."""
    if room.current is None:
        return {}
    return auth_state(change_set, change_set.states.group(room.current), keys_needed(probe))


def _parents(change_set: ChangeSet, room: RoomChanges) -> list[EventRow]:
    """Return the rows of the forward extremities, the highest first, as many as an event has."""
    change_set.events.ensure_rows(room.extremities)
    rows = [change_set.events.row_of(nid) for nid in room.extremities]
    return sorted(rows, key=lambda row: (-row.order, row.event_nid))[:MAX_PREV_EVENTS]


def _cited(change_set: ChangeSet, rows: Sequence[EventRow], version: RoomVersion) -> list[Citation]:
    """Return the citations of events; only versions 1 and 2 need their content."""
    if not version.reference_pairs:
        return [Citation(EventId(row.event_id)) for row in rows]
    events = change_set.events.events_of(row.event_nid for row in rows)
    return [cite(events[row.event_nid]) for row in rows]


def _check_redaction(
    change_set: ChangeSet, room: RoomChanges, probe: Event, state: dict[StateKey, Event]
) -> None:
    """Raise `AuthDenied` unless the user redacts an own event, or has the power to redact.

    The auth rules allow any user of a server to redact events of the same server, because a server
    is trusted with its users. So the server has to be stricter with its own. An event of another
    room is never redacted. Source: client-server API, "Redactions".
    """
    row = None if probe.redacts is None else change_set.events.row(probe.redacts)
    if row is not None and row.room_nid != room.row.room_nid:
        raise AuthDenied(
            f"{probe.redacts} is not of {probe.room_id}", rule="redaction.of_other_room"
        )
    levels = PowerLevels.of(state, probe.room_version)
    has, needs = levels.user(probe.sender), levels.named("redact")
    if has >= needs:
        return
    if row is not None and change_set.events.sender_of(row) == probe.sender:
        return
    reason = f"{probe.sender} has level {has}, redacting events of others takes {needs}"
    raise AuthDenied(reason, rule="redaction.not_own")


def _signed(
    local: LocalEvent, template: EventTemplate, version: RoomVersion, ancestry: Ancestry
) -> Event:
    """Return the signed event; the one of the plan before if it has the same ancestry."""
    built_on = (
        tuple(one.event_id for one in ancestry.prev_events),
        tuple(one.event_id for one in ancestry.auth_events),
    )
    if local.built is None or local.built_on != built_on:
        pdu = unsigned_event(template, version, **ancestry._asdict())
        local.built = parse(sign(pdu, version, *local.signer), version)
        local.built_on = built_on
    return local.built
