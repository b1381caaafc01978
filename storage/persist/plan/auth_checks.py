"""Authorise a PDU by its auth events, the state before it and the room's current state.

These are steps 4 to 6 of the checks on receipt. A PDU that fails 4 or 5 is rejected; one that fails
6 is soft-failed. `storage.event` has checked signatures and hashes before.
`storage.persist.plan.event` applies the result to the tables.

Source: server-server API, "Checks performed on receipt of a PDU".
"""

from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from storage.arguments import is_text
from storage.auth import check, check_auth_events, keys_needed
from storage.auth.membership import membership_of
from storage.auth.power_levels import PowerLevels
from storage.auth.state_keys import CREATE, JOIN_RULES, MEMBER, POWER_LEVELS, is_user_id
from storage.errors import AuthDenied
from storage.event import Event
from storage.event.building import EventTemplate, outline
from storage.event.model import auth_ids_of
from storage.event.versions import RoomVersion
from storage.ids import EventId, StateKey, server_name_of
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.rows import EventRow, RoomChanges
from storage.persist.plan.out_of_band import usable
from storage.state.groups import Group

CREATE_KEY: StateKey = ("m.room.create", "")


class AuthResult(NamedTuple):
    """The reasons why an event is rejected or soft-failed; both None if it is accepted.

    ``refused`` is the reason of the caller, for an event that would be accepted.
    """

    rejected: str | None = None
    soft_failed: str | None = None
    refused: str | None = None


def auth_rows_of(change_set: ChangeSet, event: Event) -> tuple[list[EventRow], list[EventId]]:
    """Return the rows of the auth events, and the ids of those that are not stored.

    From version 12 on, the create event that the room id names is one of them. An event that came
    out of band counts as not stored, because it is not authorised.
    """
    ids = list(dict.fromkeys(auth_ids_of(event)))
    change_set.events.ensure_ids(ids)
    rows = [usable(change_set.events.row(event_id)) for event_id in ids]
    return [row for row in rows if row is not None], [
        event_id for event_id, row in zip(ids, rows, strict=True) if row is None
    ]


def auth_nids(event: Event, auth_rows: Iterable[EventRow]) -> tuple[int, ...]:
    """Return the nids of the auth events that the event itself lists, each once.

    The version 12 create event is implied by the room id and not among them.
    """
    auth = {row.event_id: row.event_nid for row in auth_rows}
    return tuple(
        auth[event_id] for event_id in dict.fromkeys(event.auth_event_ids) if event_id in auth
    )


def auth_result(
    change_set: ChangeSet,
    room: RoomChanges,
    event: Event,
    auth_rows: Iterable[EventRow],
    *,
    before: Group | None,
    current: Group | None,
) -> AuthResult:
    """Return whether the auth rules accept, reject or soft-fail an event.

    Without ``before`` the event is an outlier, which is checked by its auth events alone. Without
    ``current`` it cannot be soft-failed.
    """
    rows = list(auth_rows)
    events = change_set.events.events_of(row.event_nid for row in rows)
    claimed = {auth_event.event_id: auth_event for auth_event in events.values()}
    rejected = {EventId(row.event_id) for row in rows if row.rejected is not None}
    has_state = before is not None and event.type != CREATE_KEY[0]
    state = (
        {}
        if before is None or not has_state
        else auth_state(change_set, before, keys_needed(event))
    )
    first = _first_create(change_set, room, event)
    if first is not None:
        return AuthResult(rejected=f"create.second: the room has the create event {first}")
    try:
        check_auth_events(event, claimed, rejected)
        if has_state and not _same(state, claimed):
            check(event, state, event.room_version)
    except AuthDenied as denied:
        return AuthResult(rejected=_reason(denied))
    if before is None or current is None or current.state_group == before.state_group:
        return AuthResult()
    return _soft(change_set, event, state, current)


def _first_create(change_set: ChangeSet, room: RoomChanges, event: Event) -> str | None:
    """Return the id of the accepted create event that the room has besides this create event.

    Return None if there is none, or for any other event. The auth rules as written would allow a
    second create event.
    """
    if event.type != CREATE_KEY[0]:
        return None
    events = change_set.events
    new = (events.new_events[nid].row for nid in events.new_creates.get(room.row.room_nid, ()))
    create_ids = [row.event_id for row in new if row.rejected is None]
    if room.row.write_version:
        create_ids += change_set.answers.answer(("create", room.row.room_nid))
    return next((event_id for event_id in create_ids if event_id != event.event_id), None)


def _soft(
    change_set: ChangeSet, event: Event, checked: Mapping[StateKey, Event], current: Group
) -> AuthResult:
    """Check an event that passed by the state ``checked`` against the room's current state."""
    state = auth_state(change_set, current, keys_needed(event))
    if state == checked:
        return AuthResult()
    try:
        check(event, state, event.room_version)
    except AuthDenied as denied:
        return AuthResult(soft_failed=_reason(denied))
    return AuthResult()


def auth_state(
    change_set: ChangeSet, group: Group, keys: Iterable[StateKey]
) -> dict[StateKey, Event]:
    """Return the events of a state under these keys, and its create event."""
    nids: dict[StateKey, int] = {}
    for key in {CREATE_KEY, *keys}:
        nid = state_nid(change_set, group, key)
        if nid is not None:
            nids[key] = nid
    events = change_set.events.events_of(nids.values())
    return {key: events[nid] for key, nid in nids.items()}


def state_nid(change_set: ChangeSet, group: Group, key: StateKey) -> int | None:
    """Return the event nid of a state under a key, or None."""
    type_nid = change_set.names.find_type(key[0])
    key_nid = None if type_nid is None else change_set.names.find_state_key(type_nid, key[1])
    return None if key_nid is None else group.entries.get(key_nid)


def _same(state: Mapping[StateKey, Event], claimed: Mapping[EventId, Event]) -> bool:
    """Return whether the state's events are exactly the auth events, which passed already."""
    return len(state) == len(claimed) and all(event.event_id in claimed for event in state.values())


def _reason(denied: AuthDenied) -> str:
    return f"{denied.rule}: {denied.reason}"


# --------------------------------------------------------------------------------------------------
# Choose the user that authorises a restricted join, and check the condition of the join rule.
#
# A restricted join rule lets the members of other rooms join without an invite. A server that is in
# the room checks that, and names a joined user of its own who may invite. The auth rules check this
# user only, so a server that names one without the check lets anybody in.
#
# Example: `allow` has the room !space. Alice is joined to !space, so her join gets
# `join_authorised_via_users_server: @bob:own`, as Bob is joined here and may invite.
#
# Source: room version 8, "Authorization rules"; client-server API, "Restricted rooms".

AUTHORISER: Final = "join_authorised_via_users_server"
NEED_NO_AUTHORISER: Final = ("join", "invite", "ban")
"""Memberships of users who may join without one, or not at all."""


def with_authoriser(
    change_set: ChangeSet, room: RoomChanges, template: EventTemplate, version: RoomVersion
) -> EventTemplate:
    """Return the template, with the authorising user if it is a join that needs one.

    A user that the content names is removed: content comes from clients, who cannot check the
    condition. Raise `AuthDenied` if the join rule does not allow the join, if this server cannot
    know, or if no local user may authorise it.
    """
    if room.current is None or not _is_join(template):
        return template
    content = {key: value for key, value in template.content.items() if key != AUTHORISER}
    template = template._replace(content=content)
    group = change_set.states.group(room.current)
    state = auth_state(change_set, group, keys_needed(outline(template, version)))
    allowed = _allowed_rooms(state.get(JOIN_RULES), version)
    if allowed is None or membership_of(template.sender, state) in NEED_NO_AUTHORISER:
        return template
    _check_condition(change_set, template.sender, allowed)
    authoriser = _authoriser(change_set, room.row.room_nid, group, state, version)
    return template._replace(content={**content, AUTHORISER: authoriser})


def _check_condition(change_set: ChangeSet, user_id: str, allowed: tuple[str, ...]) -> None:
    server = change_set.server_name
    if change_set.answers.answer(("joined_to_any", user_id, server, allowed)):
        return
    if allowed and not change_set.answers.answer(("inside_any", server, allowed)):
        reason = f"{server} is in none of the rooms that the join rule allows"
        raise AuthDenied(reason, rule="member.join.cannot_check")
    reason = f"{user_id} is in none of the rooms that the join rule allows"
    raise AuthDenied(reason, rule="member.join.not_allowed")


def _is_join(template: EventTemplate) -> bool:
    is_own = template.type == MEMBER and template.state_key == template.sender
    return is_own and template.content.get("membership") == "join"


def _allowed_rooms(rule: Event | None, version: RoomVersion) -> tuple[str, ...] | None:
    """Return the rooms whose members may join; None if the join rule is not a restricted one."""
    if rule is None or not version.is_restricted(rule.content.get("join_rule")):
        return None
    conditions = rule.content.get("allow")
    return tuple(
        condition["room_id"]
        for condition in (conditions if isinstance(conditions, list) else ())
        if isinstance(condition, dict)
        and condition.get("type") == "m.room_membership"
        and is_text(condition.get("room_id"))
    )


def _authoriser(
    change_set: ChangeSet,
    room_nid: int,
    group: Group,
    state: Mapping[StateKey, Event],
    version: RoomVersion,
) -> str:
    """Return a joined local user who may invite. Raise `AuthDenied` if there is none.

    Users with a level of their own come first, the highest first, then other members.
    """
    levels = PowerLevels.of(state, version)
    needs = levels.named("invite")
    local = [user for user in _named(state) if server_name_of(user) == change_set.server_name]
    for user_id in sorted(local, key=lambda user: (-levels.user(user), user)):
        if levels.user(user_id) >= needs and _is_joined(change_set, group, user_id):
            return user_id
    for user_id in change_set.answers.answer(("local_members", room_nid)):
        if levels.user(user_id) >= needs and _is_joined(change_set, group, user_id):
            return str(user_id)
    reason = f"no joined user of {change_set.server_name} may invite, so none can authorise it"
    raise AuthDenied(reason, rule="member.join.no_authoriser")


def _named(state: Mapping[StateKey, Event]) -> set[str]:
    """Return the users that the create event and the power levels name."""
    create = state[CREATE]
    levels = state[POWER_LEVELS].content if POWER_LEVELS in state else {}
    named: list[object] = [create.sender, create.content.get("creator")]
    for values in (create.content.get("additional_creators"), levels.get("users")):
        if isinstance(values, list | dict):
            named += values
    return {user for user in named if isinstance(user, str) and is_user_id(user) and is_text(user)}


def _is_joined(change_set: ChangeSet, group: Group, user_id: str) -> bool:
    return membership_of(user_id, auth_state(change_set, group, [(MEMBER, user_id)])) == "join"
