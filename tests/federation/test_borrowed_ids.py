"""Answers to a join with the ids of other events, which servers choose in versions 1 and 2."""

from copy import deepcopy
from typing import Any

import pytest

from storage import EventId
from tests.federation.peers import Homeserver
from tests.federation.rooms import PUBLIC, agree, shared_room
from tests.maintenance.rooms import findings

Json = dict[str, Any]
POWER, RULES = "m.room.power_levels", "m.room.join_rules"


def with_id(answer: Json, type_: str, event_id: EventId) -> Json:
    """The answer of send_join, in which a state event has the id of another event."""
    false = deepcopy(answer)
    for event in false["state"]:
        if event["type"] == type_:
            event["event_id"] = event_id
    return false


@pytest.mark.parametrize("type_", [POWER, RULES, "m.room.name"])
async def test_an_id_of_another_room_is_refused(two: list[Homeserver], type_: str) -> None:
    one, here = two
    known = await here.store.current_state(await shared_room(one, here, version="1"))
    name = ("m.room.name", "", {"name": "A room"})
    room_id = await one.store.create_room(
        one.user(), room_version="1", initial_state=[PUBLIC, name]
    )
    join = await here.make_join(room_id, one, "user")
    answer = await one.send_join(join)
    false = with_id(answer, type_, known[POWER, ""])
    refused = await here.receiver.joined(one.name, join, false, "1")
    assert (refused.outcome, refused.fault) == ("refused", "wrong_room")
    assert (await here.receiver.joined(one.name, join, answer, "1")).outcome == "joined"
    await agree(room_id, one, here)


async def test_an_id_of_another_event_of_the_room_is_refused(two: list[Homeserver]) -> None:
    one, here = two
    room_id = await shared_room(one, here, version="2")
    named = await one.do(room_id, "user", "m.room.name", {"name": "A room"}, state_key="")
    await here.receive(one, [named])
    known = await here.store.current_state(room_id)
    member, leave = "m.room.member", {"membership": "leave"}
    left = await here.do(room_id, "user", member, leave, state_key=here.user())
    await one.receive(here, [left])
    join = await here.make_join(room_id, one, "user")
    answer = await one.send_join(join)
    false = with_id(answer, "m.room.name", known[POWER, ""])
    false["state"] = [event for event in false["state"] if event["type"] != POWER]
    false["auth_chain"] = [event for event in false["auth_chain"] if event["type"] != POWER]
    refused = await here.receiver.joined(one.name, join, false, "2")
    assert (refused.outcome, refused.fault) == ("refused", "malformed_response")
    assert (await here.receiver.joined(one.name, join, answer, "2")).outcome == "joined"
    await agree(room_id, one, here)
    assert await findings(here.store) == []
