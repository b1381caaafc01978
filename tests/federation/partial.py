"""Answers to send_join with the members omitted (MSC3706), and joins by them."""

from typing import Any

from storage import RoomId
from storage.event import event_id, parse
from storage.federation import JoinResult
from tests.federation.peers import Homeserver

Json = dict[str, Any]


def omitted(response: Json, version: str, servers: list[str]) -> Json:
    """The same answer without the members that nothing else in it needs."""
    join = parse(response["event"], version)
    events = {
        parse(one, version).event_id: one for one in [*response["state"], *response["auth_chain"]]
    }
    state = [one for one in response["state"] if one["type"] != "m.room.member"]
    wanted = [*join.auth_event_ids]
    wanted += [auth for one in state for auth in parse(one, version).auth_event_ids]
    needed: dict[str, Json] = {}
    while wanted:
        one = wanted.pop()
        if one in events and one not in needed:
            needed[one] = events[one]
            wanted += parse(events[one], version).auth_event_ids
    chain = [one for one in needed.values() if one not in state]
    return {
        "state": state,
        "auth_chain": chain,
        "event": response["event"],
        "members_omitted": True,
        "servers_in_room": servers,
    }


async def join_partially(
    room_id: RoomId, server: Homeserver, resident: Homeserver, user: str = "user"
) -> JoinResult:
    """Join over federation, with the members omitted by the other server."""
    version = await resident.version(room_id)
    join = await server.make_join(room_id, resident, user)
    path = "join", room_id, event_id(join, version)
    take = resident.responder.take_membership
    response = await take(server.name, *path, join, omit_members=True)
    return await server.receiver.joined(resident.name, join, response, version)
