"""Send a message for a client: choose its parents, authorise, sign and store it; refuse another.

The steps are in local_events.py. Run it with a DSN in STORAGE_DSN, or without one on the embedded
Postgres:

    python message_from_client.py
"""

import asyncio
import os

import local_events
from signedjson.key import generate_signing_key, get_verify_key

import storage

SERVER = "s1.test"
ALICE, MALLORY = f"@alice:{SERVER}", f"@mallory:{SERVER}"


async def main() -> None:
    """Create a room, send one message, and print what the clients get."""
    key = generate_signing_key("a1")  # a homeserver keeps its key in a file
    dsn = os.environ.get("STORAGE_DSN")
    async with storage.open(dsn, server_name=SERVER, migrate=True) as store:
        room_id = await local_events.create_room(store, ALICE, key=key)
        print("created", room_id)

        body = {"msgtype": "m.text", "body": "hello"}
        event_id = await local_events.send(store, room_id, ALICE, "m.room.message", body, key=key)
        print("stored", event_id)

        # The client lost the response. It repeats the request, and the server the same event.
        message = (await store.events([event_id]))[event_id]
        keys = {(SERVER, "ed25519:a1"): get_verify_key(key)}
        [again] = await store.append([message.raw], verify_keys=keys)
        print("again:", again.outcome)

        try:
            await local_events.send(store, room_id, MALLORY, "m.room.message", body, key=key)
        except storage.AuthDenied as denied:
            print("403:", denied.rule)

        answer = await store.sync(ALICE)
        last = answer.join[room_id].timeline.events[-1]
        print("in /sync:", last.content["body"])


asyncio.run(main())
