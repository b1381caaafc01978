"""Rules on `m.room.member`: join, invite, leave, kick, unban, ban and knock.

`M(user)` below is the user's membership in the given state; None where there is no event.
`storage.event.required_signers` covers the signature of the server in
`join_authorised_via_users_server`; it is not checked here.

Source: room versions 1 to 12, authorization rules, rule "If type is m.room.member".
"""

from collections.abc import Iterator, Mapping
from itertools import islice, product
from typing import Any, Final

from canonicaljson import encode_canonical_json
from nacl.exceptions import BadSignatureError
from nacl.signing import VerifyKey
from unpaddedbase64 import decode_base64

from storage.auth.power_levels import PowerLevels, creator_of
from storage.auth.state_keys import (
    CREATE,
    JOIN_RULES,
    MEMBER,
    THIRD_PARTY_INVITE,
    denied,
    is_user_id,
)
from storage.event import Event, RoomVersion
from storage.ids import StateKey

# --------------------------------------------------------------------------------------------------
# Invitations that answer an `m.room.third_party_invite`.
#
# The identity server's signature replaces the power level check.
#
# Source: room versions 1 to 12, authorization rules, membership `invite` with `third_party_invite`.

VERIFICATIONS_MAX: Final = 1000
"""Pairs of key and signature to try, about 60 ms.

Two events of 64 KiB could otherwise require half a million verifications.
"""


def check_third_party_invite(
    event: Event, target: str, auth_state: Mapping[StateKey, Event]
) -> None:
    """Raise AuthDenied unless the signed token names the target and a third-party invite allows it.

    That invite has the same sender, and a key that fits a signature of the token.
    """
    third_party = event.content["third_party_invite"]
    signed = third_party.get("signed") if isinstance(third_party, dict) else None
    if not isinstance(signed, dict):
        raise denied(event, "member.third_party.signed", "no `signed` object")
    if "mxid" not in signed or "token" not in signed:
        raise denied(event, "member.third_party.fields", f"`signed` has only {sorted(signed)}")
    if signed["mxid"] != target:
        raise denied(
            event, "member.third_party.mxid", f"signed for {signed['mxid']!r}, invited is {target}"
        )
    token = signed["token"]
    invite = auth_state.get((THIRD_PARTY_INVITE, token)) if isinstance(token, str) else None
    if invite is None:
        raise denied(
            event, "member.third_party.token", f"no third-party invite under token {token!r}"
        )
    if event.sender != invite.sender:
        raise denied(
            event,
            "member.third_party.sender",
            f"sender {event.sender}, third-party invite by {invite.sender}",
        )
    if not _any_signature_fits(signed, invite.content):
        raise denied(
            event, "member.third_party.signature", f"no signature fits a key of {invite.event_id}"
        )


def _any_signature_fits(signed: Mapping[str, Any], invite: Mapping[str, Any]) -> bool:
    try:
        message = encode_canonical_json(
            {k: v for k, v in signed.items() if k not in ("signatures", "unsigned")}
        )
    except (ValueError, TypeError):  # such as NaN, or a lone surrogate: nothing can have signed it
        return False
    pairs = product(_keys(invite), sorted(set(_signatures(signed))))
    return any(
        _fits(message, key, signature) for key, signature in islice(pairs, VERIFICATIONS_MAX)
    )


def _signatures(signed: Mapping[str, Any]) -> Iterator[str]:
    servers = signed.get("signatures")
    for by_key in servers.values() if isinstance(servers, dict) else ():
        for key_id, signature in by_key.items() if isinstance(by_key, dict) else ():
            if key_id.startswith("ed25519:") and isinstance(signature, str):
                yield signature


def _keys(invite: Mapping[str, Any]) -> list[str]:
    """Return `public_key`, then those of `public_keys`; each once, in the order of the event."""
    listed = invite.get("public_keys")
    entries = [invite, *(listed if isinstance(listed, list) else ())]
    keys = [entry.get("public_key") for entry in entries if isinstance(entry, dict)]
    return list(dict.fromkeys(key for key in keys if isinstance(key, str)))


def _fits(message: bytes, key: str, signature: str) -> bool:
    try:
        VerifyKey(decode_base64(key)).verify(message, decode_base64(signature))
    except (BadSignatureError, ValueError):  # not base64 (ValueError), or of another length
        return False
    return True


AuthState = Mapping[StateKey, Event]


def membership_of(user_id: str, auth_state: AuthState) -> object:
    """Return M(user), the `membership` in a state.

    None if there is no event; every rule treats it as `leave`.
    """
    event = auth_state.get((MEMBER, user_id))
    return None if event is None else event.content.get("membership")


def check_member(event: Event, auth_state: AuthState, version: RoomVersion) -> None:
    """Raise AuthDenied where a membership event is not allowed.

    `auth_state` holds the create event.
    """
    target = event.state_key
    if target is None:
        raise denied(event, "member.state_key", "no state_key")
    if "membership" not in event.content:
        raise denied(event, "member.membership", "no membership in the content")
    membership = event.content["membership"]
    if membership == "join":
        _check_join(event, target, auth_state, version)
    elif membership == "invite":
        _check_invite(event, target, auth_state, version)
    elif membership == "leave":
        _check_leave(event, target, auth_state, version)
    elif membership == "ban":
        _check_ban(event, target, auth_state, version)
    elif membership == "knock" and version.knock:
        _check_knock(event, target, auth_state, version)
    else:
        raise denied(
            event,
            "member.unknown",
            f"membership {membership!r} in room version {version.identifier}",
        )


def require_joined(event: Event, auth_state: AuthState, rule: str) -> None:
    """Raise AuthDenied unless the sender is joined."""
    membership = membership_of(event.sender, auth_state)
    if membership != "join":
        raise denied(event, rule, f"sender {event.sender} {_standing(membership)}")


_STANDINGS: Final[Mapping[object, str]] = {
    None: "is not in the room",
    "leave": "has left the room",
    "join": "is in the room",
    "ban": "is banned from the room",
    "invite": "is invited to the room",
    "knock": "knocks at the room",
}


def _standing(membership: object) -> str:
    """Return a membership as the end of a sentence. A member event may have any JSON value."""
    is_text = membership is None or isinstance(membership, str)
    standing = _STANDINGS.get(membership) if is_text else None
    return standing or f"has the unknown membership {membership!r}"


def _check_join(event: Event, target: str, auth_state: AuthState, version: RoomVersion) -> None:
    if version.restricted_join and "join_authorised_via_users_server" in event.content:
        authoriser = event.content["join_authorised_via_users_server"]
        if not is_user_id(authoriser):
            raise denied(
                event, "member.join.authoriser_malformed", f"not a user id: {authoriser!r}"
            )
    create = auth_state[CREATE]
    if event.prev_event_ids == (create.event_id,) and target == creator_of(create, version):
        return
    if event.sender != target:
        raise denied(event, "member.join.sender", f"{event.sender} cannot join {target}")
    membership = membership_of(target, auth_state)
    if membership == "ban":
        raise denied(event, "member.join.banned", f"{target} is banned")
    _check_join_rule(event, membership, auth_state, version)


def _join_rule(auth_state: AuthState) -> object:
    event = auth_state.get(JOIN_RULES)
    return "invite" if event is None else event.content.get("join_rule", "invite")


def _check_join_rule(
    event: Event, membership: object, auth_state: AuthState, version: RoomVersion
) -> None:
    rule = _join_rule(auth_state)
    if rule == "public":
        return
    by_invitation = rule == "invite" or (rule == "knock" and version.knock)
    if not by_invitation and not version.is_restricted(rule):
        raise denied(
            event,
            "member.join.join_rule",
            f"join rule {rule!r} in room version {version.identifier}",
        )
    if membership in ("invite", "join"):
        return
    if by_invitation:
        raise denied(
            event,
            "member.join.not_invited",
            f"{event.sender} {_standing(membership)}, and the join rule is {rule!r}",
        )
    _check_authoriser(event, auth_state, version)


def _check_authoriser(event: Event, auth_state: AuthState, version: RoomVersion) -> None:
    """Check that the authorising user of a restricted join is joined and at the invite level."""
    authoriser = event.content.get("join_authorised_via_users_server")
    if not isinstance(authoriser, str):
        raise denied(
            event,
            "member.join.no_authoriser",
            "restricted room, no join_authorised_via_users_server",
        )
    membership = membership_of(authoriser, auth_state)
    if membership != "join":
        raise denied(
            event,
            "member.join.authoriser_not_joined",
            f"{authoriser} {_standing(membership)}",
        )
    levels = PowerLevels.of(auth_state, version)
    has, needs = levels.user(authoriser), levels.named("invite")
    if has < needs:
        raise denied(
            event,
            "member.join.authoriser_level",
            f"{authoriser} has level {has}, inviting takes {needs}",
        )


def _check_invite(event: Event, target: str, auth_state: AuthState, version: RoomVersion) -> None:
    membership = membership_of(target, auth_state)
    if "third_party_invite" in event.content:
        if membership == "ban":
            raise denied(event, "member.invite.banned", f"{target} is banned")
        check_third_party_invite(event, target, auth_state)
        return
    require_joined(event, auth_state, "member.invite.sender_not_joined")
    if membership in ("join", "ban"):
        raise denied(event, "member.invite.target", f"{target} {_standing(membership)}")
    levels = PowerLevels.of(auth_state, version)
    has, needs = levels.user(event.sender), levels.named("invite")
    if has < needs:
        raise denied(
            event, "member.invite.level", f"{event.sender} has level {has}, inviting takes {needs}"
        )


def _check_leave(event: Event, target: str, auth_state: AuthState, version: RoomVersion) -> None:
    membership = membership_of(target, auth_state)
    if event.sender == target:
        if membership in ("invite", "join") or (membership == "knock" and version.knock):
            return
        raise denied(event, "member.leave.not_in_room", f"{target} {_standing(membership)}")
    require_joined(event, auth_state, "member.kick.sender_not_joined")
    levels = PowerLevels.of(auth_state, version)
    has = levels.user(event.sender)
    if membership == "ban" and has < levels.named("ban"):
        raise denied(
            event,
            "member.unban.level",
            f"{event.sender} has level {has}, unbanning takes {levels.named('ban')}",
        )
    _require_higher_level(event, target, levels, "kick")


def _check_ban(event: Event, target: str, auth_state: AuthState, version: RoomVersion) -> None:
    require_joined(event, auth_state, "member.ban.sender_not_joined")
    _require_higher_level(event, target, PowerLevels.of(auth_state, version), "ban")


def _require_higher_level(event: Event, target: str, levels: PowerLevels, action: str) -> None:
    has, needs, has_target = levels.user(event.sender), levels.named(action), levels.user(target)
    if has < needs:
        raise denied(
            event,
            f"member.{action}.level",
            f"{event.sender} has level {has}, a {action} takes {needs}",
        )
    if has_target >= has:
        raise denied(
            event,
            f"member.{action}.target_level",
            f"{event.sender} has level {has}, {target} has {has_target}",
        )


def _check_knock(event: Event, target: str, auth_state: AuthState, version: RoomVersion) -> None:
    rule = _join_rule(auth_state)
    if not version.may_knock(rule):
        raise denied(event, "member.knock.join_rule", f"join rule {rule!r}")
    if event.sender != target:
        raise denied(event, "member.knock.sender", f"{event.sender} cannot knock for {target}")
    membership = membership_of(target, auth_state)
    if membership in ("ban", "invite", "join"):
        raise denied(event, "member.knock.membership", f"{target} {_standing(membership)}")
