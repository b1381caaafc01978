"""`check_auth_events` against a second statement of the rules: the first row that holds decides.

The lists are those that an event should have, mutated: entries missing, added, doubled, of another
room, rejected, not stored.
"""

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from storage.auth import check_auth_events
from storage.errors import AuthDenied
from storage.event import Event
from storage.ids import EventId
from tests.auth.events import make_event
from tests.auth.random_cases import build_case
from tests.auth.rule_table import ALLOW, RuleCase
from tests.auth.rule_table import verdict as rule
from tests.auth.settings import thorough

ENTERING = ("join", "invite", "knock")
SLUGS = {"missing", "rejected", "other_room", "superfluous", "duplicate", "no_create"}


@dataclass(frozen=True)
class Cited:
    """An event with the ids that it cites, what is held, and what of that is rejected."""

    event: Event
    held: Mapping[str, Event]
    rejected: Collection[str]
    v: int

    def may_be(self, one: Event) -> bool:
        """Return whether an event of this type and state key may be an auth event.

        There is one row for each kind that may.
        """
        event, content = self.event, self.event.content
        is_member, membership = event.type == "m.room.member", content.get("membership")
        signed = (
            content["third_party_invite"].get("signed")
            if isinstance(content.get("third_party_invite"), dict)
            else None
        )
        match one.type, one.state_key:
            case "m.room.create", "":
                return self.v < 12
            case "m.room.power_levels", "":
                return True
            case "m.room.join_rules", "":
                return is_member and membership in ENTERING
            case "m.room.third_party_invite", token:
                given = signed.get("token") if isinstance(signed, dict) else None
                return is_member and membership == "invite" and token is not None and token == given
            case "m.room.member", None:
                return False
            case "m.room.member", user:
                authoriser = (
                    content.get("join_authorised_via_users_server")
                    if self.v >= 8 and membership == "join"
                    else None
                )
                return user == event.sender or (is_member and user in (event.state_key, authoriser))
        return False

    def fault(self, at: int) -> str | None:
        """Return the fault of the auth event at this index, if those before it are right."""
        ids = self.event.auth_event_ids
        one = self.held.get(ids[at])
        if one is None:
            return "missing"
        rows = (
            ("rejected", one.event_id in self.rejected),
            ("other_room", one.room_id != self.event.room_id),
            ("superfluous", not self.may_be(one)),
            (
                "duplicate",
                any(
                    (self.held[i].type, self.held[i].state_key) == (one.type, one.state_key)
                    for i in ids[:at]
                ),
            ),
        )
        return next((slug for slug, holds in rows if holds), None)

    def verdict(self) -> str:
        ids = self.event.auth_event_ids
        if self.event.type == "m.room.create":
            return rule(RuleCase(self.event, {}, self.v))
        for at in range(len(ids)):
            if slug := self.fault(at):
                return f"auth_events.{slug}"
        cited = [self.held[i] for i in ids]
        if self.v >= 12:
            create = self.held.get("$" + self.event.room_id[1:])
            if create is None or create.type != "m.room.create":
                return "room.no_create"
            if create.event_id in self.rejected:
                return "room.create_rejected"
            cited.append(create)
        elif all(one.type != "m.room.create" for one in cited):
            return "auth_events.no_create"
        return rule(
            RuleCase(self.event, {(one.type, one.state_key or ""): one for one in cited}, self.v)
        )


def build(number: int) -> Cited:
    """The same for the same number."""
    case, random = build_case(number), Random(number + 1)
    version, event = str(case.v), case.event
    held: dict[str, Event] = {one.event_id: one for one in case.state.values()}
    blank = Cited(event, held, (), case.v)
    ids: list[str] = [one.event_id for one in held.values() if blank.may_be(one)]
    others = [one.event_id for one in held.values() if one.event_id not in ids]
    for one in random.sample(
        list(held.values()), min(2, len(held))
    ):  # others under the same key, and of other rooms
        again = make_event(
            version,
            one.event_id.replace("$", "$again-"),
            one.type,
            one.sender,
            one.state_key,
            one.content,
            room_id=one.room_id,
        )
        away = make_event(
            version,
            one.event_id.replace("$", "$away-"),
            one.type,
            one.sender,
            one.state_key,
            one.content,
            room_id="!away:a",
        )
        held |= {again.event_id: again, away.event_id: away}
    rejected = set(random.sample(sorted(held), min(len(held), random.choice((0, 0, 0, 1)))))
    if version == "12" and random.random() < 0.1:
        rejected = {"$create:a"} & held.keys()
    match random.choice(
        ("right", "right", "less", "more", "double", "again", "away", "absent", "message")
    ):
        case "less" if ids:
            ids.remove(random.choice(ids))
        case "more" if others:
            ids.append(random.choice(others))
        case "double" if ids:
            ids.append(random.choice(ids))
        case "again" | "away" as kind:
            ids += [one for one in held if one.startswith(f"${kind}-")][:1]
        case "absent":
            ids.append("$absent")
        case "message":
            held["$said"] = make_event(
                version,
                "$said",
                random.choice(("m.room.message", "m.room.member")),
                event.sender,
                room_id=event.room_id,
            )
            ids.append("$said")
    random.shuffle(ids)
    made = make_event(
        version,
        event.event_id,
        *(event.type, event.sender, event.state_key, event.content),
        room_id=event.room_id,
        prev=event.prev_event_ids,
        redacts=event.redacts,
        auth=ids,
    )
    return Cited(made, held, rejected, case.v)


def found(cited: Cited) -> str:
    held = {EventId(event_id): event for event_id, event in cited.held.items()}
    try:
        check_auth_events(cited.event, held, {EventId(event_id) for event_id in cited.rejected})
    except AuthDenied as denial:
        return denial.rule
    return ALLOW


@thorough
@given(st.builds(build, st.integers(0, 2**40)))
def test_agrees_with_the_second_statement(cited: Cited) -> None:
    expected, said = cited.verdict(), found(cited)
    assert said == expected or (expected != ALLOW and said.startswith(expected))


def test_every_fault_decides_some_of_the_random_cases() -> None:
    counted = Counter(build(number).verdict() for number in range(4_000))
    assert {slug for slug in SLUGS if counted[f"auth_events.{slug}"] < 20} == set()
    assert counted[ALLOW] > 100
    assert counted["room.create_rejected"] > 0
    assert counted["room.no_create"] > 0
