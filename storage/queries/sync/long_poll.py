"""Long polling: look, and while nothing is new wait for a change that concerns the user.

The response of a sync follows from events in the user's rooms, and from facts that name the user.
So these end the wait. One change is not in the events: state resolution may make a user a member
again, or remove a membership. The stream "caches" publishes that.

News of the user in a stream beside the events (account data, receipts, to-device, and those that
the process has defined) end the wait, too. The response is empty then, and its `next_batch` covers
them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from storage.queries.sync.positions import events_of
from storage.streams import SyncToken, VectorPosition
from storage.streams.notifier import Notifier

RESOLVED: Final = "caches"


class Waited(Protocol):
    """A response that may be empty."""

    @property
    def is_empty(self) -> bool: ...


A = TypeVar("A", bound=Waited)


class Look(NamedTuple, Generic[A]):
    """A response, and the keys to wait for if it is empty: the user, and the rooms of the user.

    The rooms are those as of the response, or of a later moment.
    """

    answer: A
    keys: Iterable[str]


async def until_news(
    look: Callable[[], Awaitable[Look[A]]],
    notifier: Notifier,
    reached: Callable[[A], SyncToken],
    since: SyncToken | None,
    *,
    timeout_ms: int,
    ending: Collection[str],
    included: Collection[str] = (),
) -> A:
    """Return the first response that is not empty, or before which a stream beside had news.

    Return the last one when the time is over. ``reached`` returns the positions of a response.
    ``ending`` are the streams beside the events whose news end the wait. A response has the news of
    ``included`` streams, so these only end it where the response is not empty.
    """
    if timeout_ms <= 0:
        return (await look()).answer
    beside = _beside(since, ending)
    looked_again = False
    loop = asyncio.get_running_loop()
    deadline = loop.time() + timeout_ms / 1000
    while True:
        resolved = notifier.position(RESOLVED)
        answer, keys = await look()
        left_ms = int((deadline - loop.time()) * 1000)
        if not answer.is_empty or left_ms <= 0:
            return answer
        upto = reached(answer)
        if notifier.was_told(keys, beside):
            # The news may have come after the snapshot of this response. Look once more then, so
            # that `next_batch` covers them; only once, as news may never end.
            if looked_again or not notifier.was_told(keys, _beside(upto, ending)):
                return answer
            looked_again = True
            continue
        beside = _followed(_beside(upto, ending), notifier)
        others = _followed(_beside(upto, included), notifier)
        waited = {"events": events_of(upto), **others, **beside, RESOLVED: resolved}
        if not await notifier.wait(keys, after=SyncToken.of(waited), timeout_ms=left_ms):
            return answer


def _beside(token: SyncToken | None, names: Iterable[str]) -> dict[str, VectorPosition]:
    """Return the positions of a token in the streams beside the events.

    A token from before a stream was added or defined does not name it. Then it is at 0.
    """
    if token is None:
        return {}
    named = token.positions()
    return {name: named.get(name, VectorPosition()) for name in names}


def _followed(
    positions: Mapping[str, VectorPosition], notifier: Notifier
) -> dict[str, VectorPosition]:
    """Return these positions as far as this process has followed the streams.

    A snapshot may have facts of other processes that are published here later. They are not in the
    response, so they still have to end the wait.
    """
    return {name: at.meet(notifier.position(name)) for name, at in positions.items()}
