"""Long polling: look, and if there is nothing new wait until something concerns the user, and look again.

What a sync tells of follows from events in the user's rooms, and from facts that name the user: so these are what it waits for. One
thing an event does not say: that resolution made somebody a member again, or took that away. The stream "caches" does.

News of the user in a stream beside the events (account data, receipts, to-device) ends the wait, too: the answer is empty then, and its
`next_batch` covers them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Final, NamedTuple

from storage.queries.sync.positions import BESIDE
from storage.queries.sync.types import Sync
from storage.streams import SyncToken, VectorPosition
from storage.streams.notifier import Notifier

RESOLVED: Final = "caches"


class Look(NamedTuple):
    """An answer, and what to wait for if it is empty: the user, and the rooms the user is in, as of the answer or later."""

    answer: Sync
    keys: Iterable[str]


async def until_news(
    look: Callable[[], Awaitable[Look]],
    notifier: Notifier,
    deployment: str,
    since: SyncToken | None,
    *,
    timeout_ms: int,
) -> Sync:
    """The first answer that is not empty, or before which something came in a stream beside; or the last one when the time is over."""
    if timeout_ms <= 0:
        return (await look()).answer
    beside = _beside(since)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    while True:
        resolved = notifier.position(RESOLVED)
        answer, keys = await look()
        left_ms = int((deadline - loop.time()) * 1000)
        if not answer.is_empty or left_ms <= 0 or notifier.was_told(keys, beside):
            return answer
        reached = SyncToken.parse(answer.next_batch, deployment)
        beside, after = _beside(reached), reached.advance(RESOLVED, resolved)
        if not await notifier.wait(keys, after=after, timeout_ms=left_ms):
            return answer


def _beside(token: SyncToken | None) -> dict[str, VectorPosition]:
    """Where a token is in the streams beside the events.

    One from before an upgrade does not name a stream that came with it: at 0.
    """
    if token is None:
        return {}
    named = token.positions()
    return {name: named.get(name, VectorPosition()) for name in BESIDE}
