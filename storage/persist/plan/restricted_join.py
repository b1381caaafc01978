"""Choose the user that authorises a restricted join, and check the condition of the join rule.

A restricted join rule lets the members of other rooms join without an invite. A server that is in
the room checks that, and names a joined user of its own who may invite. The auth rules check this
user only, so a server that names one without the check lets anybody in.

Example: `allow` has the room !space. Alice is joined to !space, so her join gets
`join_authorised_via_users_server: @bob:own`, as Bob is joined here and may invite.

Source: room version 8, "Authorization rules"; client-server API, "Restricted rooms".
"""

from collections.abc import Mapping
from typing import Final

from storage.arguments import is_text
from storage.auth import keys_needed
from storage.auth.level_lookup import PowerLevels
from storage.auth.membership import membership_of
from storage.auth.state_keys import CREATE, JOIN_RULES, MEMBER, POWER_LEVELS, is_user_id
from storage.errors import AuthDenied
from storage.event import Event
from storage.event.building import EventTemplate, outline
from storage.event.versions import RoomVersion
from storage.ids import StateKey, server_name_of
from storage.persist.model.change_set import ChangeSet
from storage.persist.model.row_changes import RoomChanges
from storage.persist.plan.auth_checks import auth_state
from storage.state.groups import Group

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
        one["room_id"]
        for one in (conditions if isinstance(conditions, list) else ())
        if isinstance(one, dict)
        and one.get("type") == "m.room_membership"
        and is_text(one.get("room_id"))
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
    local = [one for one in _named(state) if server_name_of(one) == change_set.server_name]
    for user_id in sorted(local, key=lambda one: (-levels.user(one), one)):
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
    return {one for one in named if isinstance(one, str) and is_user_id(one) and is_text(one)}


def _is_joined(change_set: ChangeSet, group: Group, user_id: str) -> bool:
    return membership_of(user_id, auth_state(change_set, group, [(MEMBER, user_id)])) == "join"
