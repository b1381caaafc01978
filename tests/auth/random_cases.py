"""Events and states that are mutated out of an ordinary room, for the rules of every version."""

from collections.abc import Sequence
from random import Random
from typing import Any

from hypothesis import strategies as st
from signedjson.key import generate_signing_key, get_verify_key
from signedjson.sign import sign_json
from unpaddedbase64 import encode_base64

from storage.event import Event
from storage.ids import StateKey
from tests.auth.events import CREATOR, ROOM, make_event
from tests.auth.rule_table import RuleCase

USERS = (CREATOR, "@mod:a", "@guest:b")
KEYS = [generate_signing_key(str(n)) for n in range(2)]
PUBLIC = [encode_base64(get_verify_key(key).encode()) for key in KEYS]

ARABIC_FIFTY = "\u0665\u0660"
ODD_LEVELS: tuple[Any, ...] = (
    None,
    True,
    1,
    50.7,
    1e400,
    "50",
    " +050 ",
    "-1",
    "5_0",
    ARABIC_FIFTY,
    "x",
    "",
    [],
    {},
    -1,
    2**53,
)
LEVELS = (0, 1, 49, 50, 51, 75, 99, 100, 101)
MEMBERSHIPS = ("join", "join", "join", "join", "join", "invite", "leave", "ban", "knock", None, 5)
JOIN_RULES = (
    "public",
    "invite",
    "knock",
    "restricted",
    "restricted",
    "knock_restricted",
    "private",
    7,
)
SINGLE = ("users_default", "events_default", "state_default", "ban", "redact", "kick", "invite")
TYPES = ("m.room.message", "m.room.power_levels", "m.room.redaction", "m.room.topic")
OTHER_TYPES = (
    "m.room.message",
    "m.room.topic",
    "m.room.aliases",
    "m.room.redaction",
    "m.room.third_party_invite",
    "m.room.join_rules",
)
ADDITIONAL: tuple[Any, ...] = (
    ["@mod:a"],
    ["@mod:a"],
    [],
    ["mod"],
    "@mod:a",
    [3],
    ["@x:y", "@guest:b"],
    ["@:"],
    {},
    None,
)


class Chooser:
    """A source of decisions; `version` is the room version that it decides for."""

    def __init__(self, number: int) -> None:
        self.random = Random(number)
        self.one = self.random.choice
        self.version = str(self.random.randint(1, 12))

    def chance(self, one_in: int) -> bool:
        return self.random.randrange(one_in) == 0

    def levels(self, names: Sequence[str], *, odd: bool, least: int = 0) -> dict[str, Any]:
        """Some of these names, each with a level."""
        chosen = self.random.sample(names, self.random.randint(least, len(names)))
        return {
            name: self.one(ODD_LEVELS) if odd and self.chance(8) else self.one(LEVELS)
            for name in chosen
        }

    def power_levels(self, *, odd: bool) -> dict[str, Any]:
        content = self.levels(SINGLE, odd=odd) if self.chance(2) else {}
        users = USERS[1:] if self.version == "12" and not self.chance(6) else USERS
        for group, names in (("users", users), ("events", TYPES), ("notifications", ("room", "x"))):
            if self.chance(2):
                content[group] = self.levels(names, odd=odd)
            elif odd and self.chance(12):
                content[group] = self.one((None, [], "x", 5))
        return content

    def create(self) -> Event:
        content: dict[str, Any] = {
            "creator": self.one((CREATOR, CREATOR, "@mod:a")),
            "room_version": self.version,
        }
        if self.chance(6):
            content["m.federate"] = self.one((False, False, True, 0, "false"))
        if self.chance(3):
            content["additional_creators"] = self.one(ADDITIONAL)
        return make_event(self.version, "$create:a", "m.room.create", CREATOR, "", content, prev=())

    def state(self) -> dict[StateKey, Event]:
        create = self.create()
        found = [] if self.chance(40) else [create]

        def put(kind: str, key: str, content: dict[str, Any], sender: str = CREATOR) -> None:
            found.append(
                make_event(
                    self.version,
                    f"${kind}{key}",
                    kind,
                    sender,
                    key,
                    content,
                    room_id=create.room_id,
                )
            )

        for user in USERS:
            membership = self.one(MEMBERSHIPS)
            if membership is not None:
                put("m.room.member", user, {"membership": membership}, user)
        if not self.chance(4):
            content = self.power_levels(odd=self.chance(4))
            content.setdefault(
                "users", {CREATOR: 100, "@mod:a": 50} if self.version != "12" else {"@mod:a": 50}
            )
            if self.chance(3):
                content["invite"] = 50
            put("m.room.power_levels", "", content)
        if not self.chance(4):
            put(
                "m.room.join_rules",
                "",
                {} if self.chance(8) else {"join_rule": self.one(JOIN_RULES)},
            )
        if self.chance(2):
            keys = self.one(
                (
                    {"public_key": PUBLIC[0]},
                    {"public_keys": [{"public_key": PUBLIC[1]}]},
                    {"public_key": "!"},
                    {},
                )
            )
            put("m.room.third_party_invite", "token", keys, self.one(USERS))
        return {event.key: event for event in found}

    def third_party(self, target: str) -> Any:
        signed = {
            "mxid": self.one((target, target, target, "@x:y")),
            "token": self.one(("token", "token", "token", "other", 3)),
        }
        signed = sign_json(signed, "id.example", self.one(KEYS))
        match self.one(("added", "mxid", "signatures", "signed", "all", *["nothing"] * 12)):
            case "added":
                signed["extra"] = 1
            case "mxid" | "signatures" as part:
                del signed[part]
            case "signed":
                return {"signed": "no"}
            case "all":
                return "no"
        return {"display_name": "x", "signed": signed}

    def member(self, state_key: str) -> dict[str, Any]:
        if self.chance(40):
            return {}
        content: dict[str, Any] = {
            "membership": self.one(("join", "join", "invite", "leave", "ban", "knock"))
        }
        if self.chance(40):
            content["membership"] = self.one(("other", 3, [], None))
        if self.chance(2):
            content["join_authorised_via_users_server"] = self.one(
                (*USERS, *USERS, "@absent:a", 5, "mod")
            )
        if self.chance(3):
            content["third_party_invite"] = self.third_party(state_key)
        return content

    def new_create(self, sender: str, room_id: str) -> Event:
        content = dict(self.create().content)
        if self.chance(4):
            content["room_version"] = self.one(("1", "12", "13", "", 1, None, []))
        if self.chance(6):
            del content[self.one(("creator", "room_version"))]
        prev = ["$x"] if self.chance(6) else []
        event = make_event(
            self.version, "$new:a", "m.room.create", sender, "", content, room_id=room_id, prev=prev
        )
        if self.chance(8):
            event.json["room_id"] = "!given"
        return event

    def event(self, room_id: str, current: dict[str, Any]) -> Event:
        sender = self.one(USERS)
        if self.chance(30):
            room_id = self.one(("!other:a", "!other"))
        family = self.one(
            ("create", "member", "member", "member", "power", "power", "other", "other")
        )
        if family == "create":
            return self.new_create(sender, room_id)
        kind, state_key, content = (
            self.one(OTHER_TYPES),
            self.one((None, "", sender, "@mod:a", "a", "@")),
            {},
        )
        if family == "member":
            kind, state_key = "m.room.member", self.one((*USERS, sender, sender))
            content = self.member(state_key)
            if self.chance(40):
                state_key = None
        elif family == "power":
            kind, state_key = "m.room.power_levels", ""
            content = self.power_levels(odd=self.chance(4))
            if self.chance(2):
                content = current | content
            if self.chance(30):
                content["users"] = {self.one(("nobody", "@", "@a:", "@" + "x" * 260 + ":a")): 1}
        return make_event(
            self.version,
            self.one(("$event:a", "$event:b", "$event")),
            *(kind, sender, state_key, content),
            room_id=room_id,
            prev=self.one((["$x"], ["$x"], ["$x"], ["$create:a"], ["$create:a", "$x"], [])),
            redacts=self.one((None, "$target:a", "$target:b", "$target")),
        )


def build_case(number: int) -> RuleCase:
    """The case of a number, always the same."""
    chooser = Chooser(number)
    state = chooser.state()
    power = state.get(("m.room.power_levels", ""))
    room_id = "!create:a" if chooser.version == "12" else ROOM
    return RuleCase(
        chooser.event(room_id, {} if power is None else power.content), state, int(chooser.version)
    )


cases = st.builds(build_case, st.integers(0, 2**40))
