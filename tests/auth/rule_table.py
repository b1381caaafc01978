"""The authorisation rules a second time, as tables; the first row whose condition holds decides.

A row is (versions, auth result, condition). The tables follow the rules of the room versions from
top to bottom and share nothing with storage.auth. An auth result is a rule's slug, or ALLOW.
`RuleCase` computes the values for the conditions (levels, memberships) from the raw contents.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any

from signedjson.key import decode_verify_key_bytes
from signedjson.sign import SignatureVerifyException, verify_signed_json
from unpaddedbase64 import decode_base64

from storage.event import Event

ALLOW = "allow"
KNOWN_VERSIONS = {str(n) for n in range(1, 13)}
SINGLE = {
    "users_default": 0,
    "events_default": 0,
    "state_default": 50,
    "ban": 50,
    "redact": 50,
    "kick": 50,
    "invite": 0,
}


@dataclass(frozen=True)
class RuleCase:
    """One event and the state that authorises it, with the terms that the rules use."""

    event: Event
    state: Mapping[tuple[str, str], Event]
    v: int

    @property
    def content(self) -> dict[str, Any]:
        return self.event.content

    @property
    def sender(self) -> str:
        return self.event.sender

    @property
    def target(self) -> str:
        assert self.event.state_key is not None
        return self.event.state_key

    @property
    def create(self) -> Event:
        return self.state["m.room.create", ""]

    def found(self, event_type: str, key: str = "") -> dict[str, Any] | None:
        event = self.state.get((event_type, key))
        return None if event is None else event.content

    def membership(self, user: str) -> Any:
        return (self.found("m.room.member", user) or {}).get("membership", "leave")

    @property
    def join_rule(self) -> Any:
        return (self.found("m.room.join_rules") or {}).get("join_rule", "invite")

    def number(self, value: Any) -> int | None:
        """A level as this version writes it."""
        if isinstance(value, bool):
            return None
        if isinstance(value, int):
            return value
        if (
            isinstance(value, str)
            and self.v < 10
            and re.fullmatch(r"\s*[-+]?[0-9]+\s*", value, re.ASCII)
        ):
            return int(value)
        if isinstance(value, float) and self.v < 6 and isfinite(value):
            return int(value)
        return None

    def named(self, name: str) -> int:
        level = self.number((self.found("m.room.power_levels") or {}).get(name))
        return SINGLE[name] if level is None else level

    def creators(self) -> set[str]:
        additional = self.create.content.get("additional_creators")
        return (
            {self.create.sender, *(u for u in additional if isinstance(u, str))}
            if isinstance(additional, list)
            else {self.create.sender}
        )

    @property
    def creator(self) -> Any:
        return self.create.sender if self.v >= 11 else self.create.content.get("creator")

    def level(self, user: str) -> float:
        if self.v >= 12 and user in self.creators():
            return inf
        power = self.found("m.room.power_levels")
        if power is None:
            return 100 if self.v < 12 and user == self.creator else 0
        users = power.get("users")
        level = self.number(users.get(user)) if isinstance(users, dict) else None
        return self.named("users_default") if level is None else level

    @property
    def required(self) -> int:
        events = (self.found("m.room.power_levels") or {}).get("events")
        level = self.number(events.get(self.event.type)) if isinstance(events, dict) else None
        if level is not None:
            return level
        return self.named("events_default" if self.event.state_key is None else "state_default")

    @property
    def signed(self) -> Any:
        invite = self.content["third_party_invite"]
        return invite.get("signed") if isinstance(invite, dict) else None

    @property
    def third_party_event(self) -> Event | None:
        token = self.signed["token"]
        return (
            self.state.get(("m.room.third_party_invite", token)) if isinstance(token, str) else None
        )

    def vouched(self) -> bool:
        assert self.third_party_event is not None
        invite = self.third_party_event.content
        keys = [
            invite.get("public_key"),
            *(k.get("public_key") for k in invite.get("public_keys", [])),
        ]
        for server, by_id in self.signed.get("signatures", {}).items():
            for key_id in by_id:
                for key in keys:
                    try:
                        verify_signed_json(
                            self.signed, server, decode_verify_key_bytes(key_id, decode_base64(key))
                        )
                    except (SignatureVerifyException, ValueError, AttributeError, TypeError):
                        continue
                    return True
        return False

    def authoriser_can_invite(self) -> bool:
        user = self.content.get("join_authorised_via_users_server")
        return (
            isinstance(user, str)
            and self.membership(user) == "join"
            and self.level(user) >= self.named("invite")
        )


def server(identifier: str) -> str:
    return identifier.split(":", 1)[1] if ":" in identifier else f"no server in {identifier}"


def user_id(value: Any) -> bool:
    return (
        isinstance(value, str)
        and bool(re.fullmatch(r"@[^:]*:.+", value, re.DOTALL))
        and len(value.encode()) <= 255
    )


Condition = Callable[[RuleCase], Any]
Row = tuple[int, int, str, Condition]


def always(_: RuleCase) -> bool:
    return True


def row(verdict: str, condition: Condition = always, *, since: int = 1, until: int = 12) -> Row:
    return since, until, verdict, condition


CREATE: list[Row] = [
    row("create.prev_events", lambda c: c.event.prev_event_ids),
    row("create.domain", lambda c: server(c.event.room_id) != server(c.sender), until=11),
    row("create.room_id", lambda c: "room_id" in c.event.json, since=12),
    row(
        "create.room_version",
        lambda c: (
            "room_version" in c.content and c.content["room_version"] not in list(KNOWN_VERSIONS)
        ),
    ),
    row("create.creator", lambda c: "creator" not in c.content, until=10),
    row(
        "create.additional_creators",
        lambda c: (
            "additional_creators" in c.content
            and not (
                isinstance(c.content["additional_creators"], list)
                and all(map(user_id, c.content["additional_creators"]))
            )
        ),
        since=12,
    ),
    row(ALLOW),
]

ROOM: list[Row] = [
    row("room.no_create", lambda c: ("m.room.create", "") not in c.state),
    row("room.other_room", lambda c: c.event.room_id != c.create.room_id, until=11),
    row("room.other_room", lambda c: c.event.room_id[1:] != c.create.event_id[1:], since=12),
    row(
        "room.not_federated",
        lambda c: (
            c.create.content.get("m.federate") is False
            and server(c.sender) != server(c.create.sender)
        ),
    ),
]

ALIASES: list[Row] = [
    row("aliases.state_key", lambda c: c.event.state_key is None),
    row("aliases.domain", lambda c: c.target != server(c.sender)),
    row(ALLOW),
]

MEMBER: list[Row] = [
    row("member.state_key", lambda c: c.event.state_key is None),
    row("member.membership", lambda c: "membership" not in c.content),
]

JOIN: list[Row] = [
    row(
        "member.join.authoriser_malformed",
        lambda c: (
            "join_authorised_via_users_server" in c.content
            and not user_id(c.content["join_authorised_via_users_server"])
        ),
        since=8,
    ),
    row(
        ALLOW,
        lambda c: list(c.event.prev_event_ids) == [c.create.event_id] and c.target == c.creator,
    ),
    row("member.join.sender", lambda c: c.sender != c.target),
    row("member.join.banned", lambda c: c.membership(c.sender) == "ban"),
    row(ALLOW, lambda c: c.join_rule == "invite" and c.membership(c.sender) in ["invite", "join"]),
    row(
        ALLOW,
        lambda c: c.join_rule == "knock" and c.membership(c.sender) in ["invite", "join"],
        since=7,
    ),
    row(
        ALLOW,
        lambda c: c.join_rule == "restricted" and c.membership(c.sender) in ["invite", "join"],
        since=8,
    ),
    row(ALLOW, lambda c: c.join_rule == "restricted" and c.authoriser_can_invite(), since=8),
    row(
        ALLOW,
        lambda c: (
            c.join_rule == "knock_restricted" and c.membership(c.sender) in ["invite", "join"]
        ),
        since=10,
    ),
    row(ALLOW, lambda c: c.join_rule == "knock_restricted" and c.authoriser_can_invite(), since=10),
    row(ALLOW, lambda c: c.join_rule == "public"),
    row("member.join"),
]

INVITE_THIRD_PARTY: list[Row] = [
    row("member.invite.banned", lambda c: c.membership(c.target) == "ban"),
    row("member.third_party.signed", lambda c: not isinstance(c.signed, dict)),
    row("member.third_party.fields", lambda c: not {"mxid", "token"} <= set(c.signed)),
    row("member.third_party.mxid", lambda c: c.signed["mxid"] != c.target),
    row("member.third_party.token", lambda c: c.third_party_event is None),
    row(
        "member.third_party.sender",
        lambda c: c.third_party_event is not None and c.third_party_event.sender != c.sender,
    ),
    row(ALLOW, lambda c: c.vouched()),
    row("member.third_party.signature"),
]

INVITE: list[Row] = [
    row("member.invite.sender_not_joined", lambda c: c.membership(c.sender) != "join"),
    row("member.invite.target", lambda c: c.membership(c.target) in ["join", "ban"]),
    row(ALLOW, lambda c: c.level(c.sender) >= c.named("invite")),
    row("member.invite.level"),
]

LEAVE: list[Row] = [
    row(ALLOW, lambda c: c.sender == c.target and c.membership(c.target) in ["invite", "join"]),
    row(ALLOW, lambda c: c.sender == c.target and c.membership(c.target) == "knock", since=7),
    row("member.leave.not_in_room", lambda c: c.sender == c.target),
    row("member.kick.sender_not_joined", lambda c: c.membership(c.sender) != "join"),
    row(
        "member.unban.level",
        lambda c: c.membership(c.target) == "ban" and c.level(c.sender) < c.named("ban"),
    ),
    row(
        ALLOW,
        lambda c: c.level(c.sender) >= c.named("kick") and c.level(c.target) < c.level(c.sender),
    ),
    row("member.kick."),
]

BAN: list[Row] = [
    row("member.ban.sender_not_joined", lambda c: c.membership(c.sender) != "join"),
    row(
        ALLOW,
        lambda c: c.level(c.sender) >= c.named("ban") and c.level(c.target) < c.level(c.sender),
    ),
    row("member.ban."),
]

KNOCK: list[Row] = [
    row("member.knock.join_rule", lambda c: c.join_rule != "knock", since=7, until=9),
    row(
        "member.knock.join_rule",
        lambda c: c.join_rule not in ["knock", "knock_restricted"],
        since=10,
    ),
    row("member.knock.sender", lambda c: c.sender != c.target),
    row(ALLOW, lambda c: c.membership(c.sender) not in ["ban", "invite", "join"]),
    row("member.knock.membership"),
]

MEMBERSHIPS: dict[str, tuple[int, list[Row]]] = {
    "join": (1, JOIN),
    "invite": (1, INVITE),
    "leave": (1, LEAVE),
    "ban": (1, BAN),
    "knock": (7, KNOCK),
}

ORDINARY: list[Row] = [
    row("sender.not_joined", lambda c: c.membership(c.sender) != "join"),
    row(
        "third_party_invite.level",
        lambda c: (
            c.event.type == "m.room.third_party_invite" and c.level(c.sender) < c.named("invite")
        ),
    ),
    row(ALLOW, lambda c: c.event.type == "m.room.third_party_invite"),
    row("event.level", lambda c: c.required > c.level(c.sender)),
    row(
        "event.state_key",
        lambda c: (c.event.state_key or "")[:1] == "@" and c.event.state_key != c.sender,
    ),
]

REDACTION: list[Row] = [
    row(ALLOW, lambda c: c.level(c.sender) >= c.named("redact")),
    row(ALLOW, lambda c: server(c.event.redacts or "no target") == server(c.event.event_id)),
    row("redaction.level"),
]


def malformed(c: RuleCase) -> bool:
    """Check single levels and objects of levels; `notifications` if the version has them."""
    if any(name in c.content and c.number(c.content[name]) is None for name in SINGLE):
        return True
    groups = ["events", "users"] + (["notifications"] if c.v >= 6 else [])
    for group in groups:
        entries = c.content.get(group, {})
        if not isinstance(entries, dict) or any(
            c.number(value) is None for value in entries.values()
        ):
            return True
    return False


def alterations(c: RuleCase, group: str | None) -> list[tuple[str, int | None, int | None]]:
    """Return (name, old, new) of each addition, change and removal.

    Unreadable old values do not exist.
    """
    old = c.found("m.room.power_levels") or {}
    new = c.content
    if group is None:
        before = {k: c.number(old.get(k)) for k in SINGLE}
        after = {k: c.number(new.get(k)) for k in SINGLE}
    else:
        before = (
            {k: c.number(x) for k, x in old[group].items()}
            if isinstance(old.get(group), dict)
            else {}
        )
        after = {k: c.number(x) for k, x in new.get(group, {}).items()}
    return [
        (k, before.get(k), after.get(k)) for k in {*before, *after} if before.get(k) != after.get(k)
    ]


def over(value: int | None, limit: float) -> bool:
    return value is not None and value > limit


POWER: list[Row] = [
    row("power_levels.malformed", malformed),
    row("power_levels.users", lambda c: not all(map(user_id, c.content.get("users", {})))),
    row("power_levels.creator", lambda c: c.creators() & set(c.content.get("users", {})), since=12),
    row(ALLOW, lambda c: c.found("m.room.power_levels") is None),
    row(
        "power_levels.",
        lambda c: any(over(old, c.level(c.sender)) for _, old, _ in alterations(c, None)),
    ),
    row(
        "power_levels.",
        lambda c: any(over(new, c.level(c.sender)) for _, _, new in alterations(c, None)),
    ),
    row(
        "power_levels.",
        lambda c: any(over(old, c.level(c.sender)) for _, old, _ in alterations(c, "events")),
    ),
    row(
        "power_levels.",
        lambda c: any(over(new, c.level(c.sender)) for _, _, new in alterations(c, "events")),
    ),
    row(
        "power_levels.",
        lambda c: any(
            over(old, c.level(c.sender)) for _, old, _ in alterations(c, "notifications")
        ),
        since=6,
    ),
    row(
        "power_levels.",
        lambda c: any(
            over(new, c.level(c.sender)) for _, _, new in alterations(c, "notifications")
        ),
        since=6,
    ),
    row(
        "power_levels.",
        lambda c: any(
            user != c.sender and old is not None and old >= c.level(c.sender)
            for user, old, _ in alterations(c, "users")
        ),
    ),
    row(
        "power_levels.",
        lambda c: any(over(new, c.level(c.sender)) for _, _, new in alterations(c, "users")),
    ),
    row(ALLOW),
]


def tables(c: RuleCase) -> list[list[Row]]:
    """The tables that an event runs through."""
    kind = c.event.type
    if kind == "m.room.create":
        return [CREATE]
    if kind == "m.room.aliases" and c.v <= 5:
        return [ROOM, ALIASES]
    if kind == "m.room.member":
        membership = c.content.get("membership")
        since, rows = (
            MEMBERSHIPS.get(membership, (99, [])) if isinstance(membership, str) else (99, [])
        )
        if membership == "invite" and "third_party_invite" in c.content:
            rows = INVITE_THIRD_PARTY
        return [ROOM, MEMBER, rows if c.v >= since else [], [row("member.unknown")]]
    own = {"m.room.power_levels": [POWER]}.get(kind, [])
    if kind == "m.room.redaction" and c.v <= 2:
        own = [REDACTION]
    return [ROOM, ORDINARY, *own, [row(ALLOW)]]


def verdict(c: RuleCase) -> str:
    """ALLOW, or the slug (or the beginning of the slug) of the rule that refuses."""
    for table in tables(c):
        for since, until, decision, condition in table:
            if since <= c.v <= until and condition(c):
                return decision
    raise AssertionError("no row decides")
