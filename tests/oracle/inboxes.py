"""To-device messages of the oracle.

Each waits until its device returns the token of a sync that included it.
"""

from collections import defaultdict
from collections.abc import Sequence


class Inboxes:
    """One list for each device.

    A token is the position of the last message that anybody was sent by then.
    """

    def __init__(self) -> None:
        self.waiting: dict[tuple[str, str], list[tuple[int, str]]] = defaultdict(list)
        self.last = 0

    def send(self, user_id: str, device_id: str, bodies: Sequence[str]) -> None:
        """Put messages into the inbox of a device, in this order."""
        for body in bodies:
            self.last += 1
            self.waiting[user_id, device_id].append((self.last, body))

    def receive(self, user_id: str, device_id: str, since: int | None) -> tuple[list[str], int]:
        """Delete the messages up to this token; return the rest and a token that includes it."""
        inbox = self.waiting[user_id, device_id] = [
            one for one in self.waiting[user_id, device_id] if one[0] > (since or 0)
        ]
        return [body for _, body in inbox], self.last
