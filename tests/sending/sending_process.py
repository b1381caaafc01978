"""A process of a homeserver that sends messages to a room, all at once.

It prints their event ids and outcomes as JSON. It begins when a line arrives on standard input.
"""

import asyncio
import json
import sys

from storage.ids import RoomId
from tests.sending.stores import opened, say


async def main(dsn: str, instance_name: str, room_id: str, count: int) -> None:
    async with opened(dsn, instance_name) as store:
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.readline)
        sent = await asyncio.gather(
            *(say(store, RoomId(room_id), by=instance_name, n=n) for n in range(count)),
            # both processes get these requests
            *(say(store, RoomId(room_id), ("DEVICE", str(n)), same=n) for n in range(count // 4)),
        )
    sys.stdout.write(json.dumps([(one.event_id, one.outcome) for one in sent]) + "\n")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
