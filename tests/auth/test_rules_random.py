"""`check` against the table of rules, on mutated events and states."""

from typing import Any

from hypothesis import given

from storage.auth import check, keys_needed
from storage.errors import AuthDenied
from storage.event import Event
from storage.event.reading import for_auth_checks
from storage.ids import StateKey
from tests.auth.random_cases import build_case, cases
from tests.auth.rule_table import ALLOW, RuleCase, verdict
from tests.auth.settings import thorough

RULES = {
    "create.prev_events",
    "create.domain",
    "create.room_id",
    "create.room_version",
    "create.creator",
    "create.additional_creators",
    "room.no_create",
    "room.other_room",
    "room.not_federated",
    "aliases.state_key",
    "aliases.domain",
    "member.state_key",
    "member.membership",
    "member.unknown",
    "member.join.authoriser_malformed",
    "member.join.sender",
    "member.join.banned",
    "member.join.join_rule",
    "member.join.not_invited",
    "member.join.no_authoriser",
    "member.join.authoriser_not_joined",
    "member.join.authoriser_level",
    "member.invite.banned",
    "member.invite.sender_not_joined",
    "member.invite.target",
    "member.invite.level",
    "member.third_party.signed",
    "member.third_party.fields",
    "member.third_party.mxid",
    "member.third_party.token",
    "member.third_party.sender",
    "member.third_party.signature",
    "member.leave.not_in_room",
    "member.kick.sender_not_joined",
    "member.unban.level",
    "member.kick.level",
    "member.kick.target_level",
    "member.ban.sender_not_joined",
    "member.ban.level",
    "member.ban.target_level",
    "member.knock.join_rule",
    "member.knock.sender",
    "member.knock.membership",
    "sender.not_joined",
    "third_party_invite.level",
    "event.level",
    "event.state_key",
    "redaction.level",
    "power_levels.malformed",
    "power_levels.users",
    "power_levels.creator",
    "power_levels.current",
    "power_levels.new",
    "power_levels.users_current",
    "power_levels.users_new",
}
"""Every slug of `check`. They are stable: a program may act on them."""


def decision(case: RuleCase) -> str:
    try:
        check(case.event, case.state, str(case.v))
    except AuthDenied as denial:
        return (
            denial.rule
            if denial.event_id == case.event.event_id and denial.reason
            else "denied without values"
        )
    return ALLOW


@thorough
@given(cases)
def test_check_agrees_with_the_table(case: RuleCase) -> None:
    expected, found = verdict(case), decision(case)
    assert found == expected or (expected != ALLOW and found.startswith(expected))


@thorough
@given(cases)
def test_check_decides_the_same_with_the_events_that_a_process_keeps(case: RuleCase) -> None:
    kept = {key: for_auth_checks(event) for key, event in case.state.items()}
    assert decision(RuleCase(case.event, kept, case.v)) == decision(case)
    checked_again = RuleCase(for_auth_checks(case.event), kept, case.v)
    if case.event.state_key is not None and decision(case) == ALLOW:
        assert decision(checked_again) == ALLOW


class KeyWatchingState(dict[StateKey, Event]):
    """A state that notes under which keys it was asked."""

    def __init__(self, state: dict[StateKey, Event]) -> None:
        super().__init__(state)
        self.asked: set[StateKey] = set()

    def __getitem__(self, key: StateKey) -> Event:
        self.asked.add(key)
        return super().__getitem__(key)

    def get(self, key: StateKey, default: Any = None) -> Any:
        self.asked.add(key)
        return super().get(key, default)


@thorough
@given(cases)
def test_check_asks_for_no_other_keys_than_those_needed(case: RuleCase) -> None:
    state = KeyWatchingState(dict(case.state))
    decision(RuleCase(case.event, state, case.v))
    assert state.asked <= keys_needed(case.event)


def test_every_rule_decides_some_of_the_random_cases() -> None:
    """The comparison reaches every rule: the refusals and what each family allows.

    There is no other slug.
    """
    found: dict[str, set[str]] = {}
    for number in range(30_000):
        case = build_case(number)
        found.setdefault(decision(case), set()).add(case.event.type)
    allowed = found.pop(ALLOW)
    assert set(found) == RULES
    assert {
        "m.room.create",
        "m.room.member",
        "m.room.power_levels",
        "m.room.aliases",
        "m.room.redaction",
    } <= allowed
