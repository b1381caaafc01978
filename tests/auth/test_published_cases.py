"""Published cases of other projects.

Where this package decides differently, the case is named with the reason.
"""

from typing import Any

import pytest

from storage.auth import auth_chain, check, conflicted_subgraph
from storage.auth.resolution.v2 import reverse_topological_power_order
from storage.errors import AuthDenied
from storage.event import Event
from storage.ids import EventId, StateKey
from tests.auth.events import make_event, state_of
from tests.vectors import vectors

DIFFERENCES = {
    "Missing state_key/m.room.create": "the rules for a create event do not look at its state key",
    "The state_key is not empty": "the rules for a create event do not look at its state key",
    "The sender doesn't match the joining user": (
        "rule 'only previous event is the create event' asks for the state key only"
    ),
    "Invalid redacts event ID": "versions 1 and 2: whoever has the redact level may name anything",
    "Missing redacts event ID": "versions 1 and 2: whoever has the redact level may name anything",
}
"""Denied by gomatrixserverlib, allowed by the specification's text (and by Synapse)."""


def event_of(pdu: dict[str, Any], version: str) -> Event:
    return make_event(
        version,
        pdu["event_id"],
        pdu["type"],
        pdu["sender"],
        pdu.get("state_key"),
        pdu["content"],
        room_id=pdu["room_id"],
        prev=[e if isinstance(e, str) else e[0] for e in pdu.get("prev_events", [])],
        auth=[e if isinstance(e, str) else e[0] for e in pdu.get("auth_events", [])],
        redacts=pdu.get("redacts"),
        depth=pdu.get("depth", 1),
        ts=pdu.get("origin_server_ts", 1),
    )


def state_from(auth_events: dict[str, Any], version: str) -> dict[StateKey, Event]:
    """Their map is by kind; some events in it lack the (empty) state key."""
    state: dict[StateKey, Event] = {}
    for kind, value in auth_events.items():
        entries = value if kind in {"member", "third_party_invite"} else {"": value}
        for state_key, pdu in entries.items():
            state["m.room." + kind, state_key] = event_of(pdu | {"state_key": state_key}, version)
    return state


def denied_cases() -> list[tuple[str, Event, dict[StateKey, Event], str]]:
    cases = []
    for case in vectors("gomatrixserverlib/event_auth_cases.json"):
        state = state_from(case["auth_events"], case["room_version"])
        for pdu in case["not_allowed"]:
            reason = pdu["unsigned"]["not_allowed"]
            if reason == "Missing state_key" and pdu["type"] == "m.room.create":
                reason += "/m.room.create"
            cases.append((reason, event_of(pdu, case["room_version"]), state, case["room_version"]))
    return cases


def test_gomatrixserverlib_allows() -> None:
    allowed = 0
    for case in vectors("gomatrixserverlib/event_auth_cases.json"):
        state = state_from(case["auth_events"], case["room_version"])
        for pdu in case["allowed"]:
            check(event_of(pdu, case["room_version"]), state, case["room_version"])
            allowed += 1
    assert allowed == 29


def test_gomatrixserverlib_denies_except_for_the_named_differences() -> None:
    cases = denied_cases()
    assert len(cases) == 40
    differing = set()
    for reason, event, state, version in cases:
        try:
            check(event, state, version)
        except AuthDenied:
            continue
        differing.add(reason)
    assert differing == set(DIFFERENCES)


def test_soft_fail_split() -> None:
    events = {
        pdu["event_id"]: event_of(pdu, "10") for pdu in vectors("tuwunel/soft-fail-split.json")
    }
    delayed = events["$ghost_delayed_leave"]
    at_event = state_of(
        *(events[e] for e in ("$create", "$alice_join", "$power", "$join_rules", "$ghost_join"))
    )
    check(delayed, at_event, "10")
    current = at_event | state_of(events["$ghost_current_leave"])
    with pytest.raises(AuthDenied) as denial:
        check(delayed, current, "10")
    assert denial.value.rule == "member.leave.not_in_room"


def graph_events(graph: dict[str, list[str]]) -> dict[EventId, Event]:
    return {
        EventId(e): make_event("10", e, "m.x", "@u:a", e, auth=auth) for e, auth in graph.items()
    }


def test_auth_chains_of_a_graph() -> None:
    vector = vectors("gomatrixserverlib/auth_chain_graphs.json")
    events = graph_events(vector["graph"])
    for case in vector["auth_chain"]:
        assert auth_chain(case["start"], events) == set(case["want"])


def test_conflicted_subgraphs_of_a_graph() -> None:
    vector = vectors("gomatrixserverlib/auth_chain_graphs.json")
    events = graph_events(vector["graph"])
    for case in vector["conflicted_subgraph"]:
        assert conflicted_subgraph(case["conflicted"], events) == set(case["want"])


def test_power_sort() -> None:
    vector = vectors("gomatrixserverlib/auth_chain_graphs.json")["power_sort"]
    events: dict[EventId, Event] = {}
    for name, level, ts in vector["input"]:
        power = make_event(
            "10",
            f"$power-{name}",
            "m.room.power_levels",
            "@u:a",
            "",
            {"users": {f"@{name}:a": level}},
        )
        events[power.event_id] = power
        events[EventId(name)] = make_event(
            "10", name, "m.x", f"@{name}:a", "", auth=[power.event_id], ts=ts
        )
    ids = [EventId(name) for name, _, _ in vector["input"]]
    assert reverse_topological_power_order(ids, events.get) == vector["want"]
    assert reverse_topological_power_order(ids[::-1], events.get) == vector["want"]
