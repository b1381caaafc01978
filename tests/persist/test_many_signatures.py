"""Events with more signatures of one server than any server makes."""

import json

import pytest
from signedjson.key import generate_signing_key, get_verify_key

from storage.event import parse
from storage.persist.receive import SIGNATURES_MAX, check_signatures
from storage.testing import KEY_ID, RoomBuilder, verify_key

SERVER = "s1.test"


@pytest.mark.parametrize("false,accepted", [(SIGNATURES_MAX - 1, True), (SIGNATURES_MAX, False)])
async def test_few_signatures_by_known_keys_are_checked(false: int, accepted: bool) -> None:
    room = RoomBuilder("11")
    room.start(f"@alice:{SERVER}")
    sent = json.loads(room.pdus[-1])
    others = {f"ed25519:0{number}": generate_signing_key(f"0{number}") for number in range(false)}
    wrong = dict.fromkeys([*others, *(f"ed25519:unknown{n}" for n in range(20))], "A" * 86)
    sent["signatures"][SERVER] = wrong | sent["signatures"][SERVER]
    keys = {(SERVER, one): get_verify_key(key) for one, key in others.items()}
    keys[SERVER, KEY_ID] = verify_key(SERVER)
    refusal = await check_signatures(parse(sent, "11"), keys)
    assert (refusal is None) == accepted
