"""The syncing users and devices of each worker, from USER_SYNC and CLEAR_USER_SYNC, for presence.

A worker's users are removed when it says so, when its link ends, or when it returns over another
link and sends its users again. Where all share one link, they are removed after a silence.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from storage.errors import ProtocolError
from storage.replication.commands import FederationAck, UserSync
from storage.replication.transport import Link

logger: logging.Logger = logging.getLogger(__name__)

Session = tuple[str, str | None]
"""A user and a device; None: the worker did not send it."""

ID_BYTES_MAX = 512
"""Of a user or a device id.

User ids have 255 bytes at most; the specification has no limit for devices.
"""


class Syncing:
    """The sessions of each worker.

    ``sessions_max`` applies to all workers of one link; above it the oldest are dropped.
    """

    def __init__(self, sessions_max: int = 50_000) -> None:
        self._sessions_max = sessions_max
        self._sessions: dict[str, dict[Session, int]] = {}
        self._links: dict[str, object] = {}
        self._counts: dict[object, int] = {}
        self._overflowed: set[object] = set()

    def record(self, command: UserSync, link: object) -> None:
        """Record a command of a worker. Raise `ProtocolError` for an id that is too long."""
        _check_length(command)
        name, session = command.instance_name, (command.user_id, command.device_id)
        if self._links.get(name, link) is not link:
            self.clear(name)
        self._remove(name, session)
        if command.is_syncing:
            self._links[name] = link
            self._sessions.setdefault(name, {})[session] = command.last_sync_ms
            self._counts[link] = self._counts.get(link, 0) + 1
            if self._counts[link] > self._sessions_max:
                self._drop_oldest(name, link)

    def clear(self, instance_name: str) -> None:
        """Remove all users of a worker."""
        sessions = self._sessions.pop(instance_name, None)
        if sessions is not None:
            self._uncount(self._links.pop(instance_name), len(sessions))

    def lost(self, link: object) -> None:
        """Remove the users of all workers of a link that has ended."""
        for instance_name in [name for name, own in self._links.items() if own is link]:
            self.clear(instance_name)
        self._overflowed.discard(link)

    def users(self) -> set[str]:
        return {user_id for sessions in self._sessions.values() for user_id, _ in sessions}

    def is_syncing(self, user_id: str) -> bool:
        """Return whether this user is syncing anywhere."""
        return any(user_id == user for sessions in self._sessions.values() for user, _ in sessions)

    def workers(self) -> dict[str, set[Session]]:
        return {name: set(sessions) for name, sessions in self._sessions.items()}

    def last_sync_ms(self, user_id: str) -> int | None:
        """Return when this user's latest sync began; None if the user is not syncing."""
        return max(
            (
                at
                for sessions in self._sessions.values()
                for (user, _), at in sessions.items()
                if user == user_id
            ),
            default=None,
        )

    def _remove(self, name: str, session: Session) -> None:
        sessions = self._sessions.get(name)
        if sessions is None or sessions.pop(session, None) is None:
            return
        self._uncount(self._links[name], 1)
        if not sessions:
            del self._sessions[name], self._links[name]

    def _uncount(self, link: object, sessions: int) -> None:
        self._counts[link] -= sessions
        if not self._counts[link]:
            del self._counts[link]

    def _drop_oldest(self, name: str, link: object) -> None:
        """Drop the oldest session of the worker, or of another one if this is its only one."""
        if len(self._sessions[name]) == 1:
            name = next(
                other for other, own in self._links.items() if own is link and other != name
            )
        if link not in self._overflowed:
            self._overflowed.add(link)
            logger.warning(
                "more than %d users sync over one connection: the oldest are dropped",
                self._sessions_max,
            )
        self._remove(name, next(iter(self._sessions[name])))


def _check_length(command: UserSync) -> None:
    for text in (command.user_id, command.device_id or ""):
        if len(text.encode()) > ID_BYTES_MAX:
            raise ProtocolError(f"a user or device id of more than {ID_BYTES_MAX} bytes")


# --------------------------------------------------------------------------------------------------
# The links of worker names: one link cannot change what another has sent for a worker.
#
# A name belongs to a link from the first command with the name until the link ends. Another link
# that uses the name is refused. The exception is a first link that was silent for two pings: then
# the worker is back over a new connection, and the old one is ended. If one link has too many
# names, the oldest are dropped.


class WorkerNames:
    """The names of the workers of each link.

    ``own`` is the name of this process, which no link may use (None: any may).
    """

    def __init__(
        self, own: str | None, names_max: int, silent_ms: int, forget: Callable[[str], None]
    ) -> None:
        self._own = own
        self._names_max = names_max
        self._silent_s = 2 * silent_ms / 1000
        self._forget = forget
        self._links: dict[str, Link] = {}
        self._names: dict[Link, OrderedDict[str, None]] = {}
        self._overflowed: set[Link] = set()

    def __len__(self) -> int:
        return len(self._links)

    def claim(self, name: str, link: Link) -> None:
        """Assign the name of a worker to a link.

        Raise `ProtocolError` where another link has it, or where it is this process.
        """
        owner = self._links.get(name)
        if owner is not link:
            self._refuse(name, owner)
            self._links[name] = link
        names = self._names.setdefault(link, OrderedDict())
        names[name] = None
        names.move_to_end(name)
        if len(names) > self._names_max:
            self._drop_oldest(link)

    def lost(self, link: Link) -> list[str]:
        """Return the names of a link that has ended; other links may use them now."""
        names = list(self._names.pop(link, ()))
        self._overflowed.discard(link)
        for name in names:
            del self._links[name]
        return names

    def _refuse(self, name: str, owner: Link | None) -> None:
        if name == self._own:
            raise ProtocolError(f"{name} is the name of this process")
        if owner is None:
            return
        if owner.silent_s() < self._silent_s:
            raise ProtocolError(f"{name} is the name of another connection")
        logger.info("%s has a new connection, not that of %s", name, owner.name)
        self._release(name, owner)
        owner.refuse(f"{name} is back over another connection")

    def _drop_oldest(self, link: Link) -> None:
        name = next(iter(self._names[link]))
        if link not in self._overflowed:
            self._overflowed.add(link)
            logger.warning(
                "%s uses the names of more than %d workers: the oldest names are dropped",
                link.name,
                self._names_max,
            )
        self._release(name, link)

    def _release(self, name: str, link: Link) -> None:
        del self._links[name]
        del self._names[link][name]
        self._forget(name)


# --------------------------------------------------------------------------------------------------
# Acknowledged positions of the workers that send to other servers (FEDERATION_ACK).
#
# Data up to the lowest of them may be deleted. A worker whose link ended is remembered for a while,
# because it continues from its position when it returns. After that it is ignored. So are the first
# ones that left, where there are too many.

UNLINKED_MAX = 1_000
"""Workers without a link that are remembered."""


class Acknowledgements:
    """The position that each worker has acknowledged.

    ``keep_ms`` is how long a worker is remembered after its link has ended; ``clock`` returns
    seconds.
    """

    def __init__(
        self, keep_ms: int = 86_400_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._keep_s = keep_ms / 1000
        self._clock = clock
        self._tokens: dict[str, int] = {}
        self._unlinked: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def record(self, command: FederationAck) -> None:
        """Record an acknowledged position of a worker; an older one than before changes nothing."""
        self._drop_old()
        previous = self._tokens.get(command.instance_name)
        self._tokens[command.instance_name] = (
            command.token if previous is None else max(previous, command.token)
        )
        self._unlinked.pop(command.instance_name, None)

    def lost(self, instance_names: Iterable[str]) -> None:
        """Record that the link of these workers has ended."""
        for name in instance_names:
            if name in self._tokens:
                self._unlinked[name] = self._clock()
                self._unlinked.move_to_end(name)
        self._drop_old()

    def of(self, instance_name: str) -> int | None:
        """Return the acknowledged position of this worker.

        None if it has none, or left too long ago.
        """
        self._drop_old()
        return self._tokens.get(instance_name)

    def lowest(self) -> int | None:
        """Return the position that every worker has acknowledged; None if there is no worker."""
        self._drop_old()
        return min(self._tokens.values(), default=None)

    def forget(self, instance_name: str) -> None:
        """Forget a worker that will not return."""
        self._tokens.pop(instance_name, None)
        self._unlinked.pop(instance_name, None)

    def _drop_old(self) -> None:
        oldest = self._clock() - self._keep_s
        while self._unlinked and (
            len(self._unlinked) > UNLINKED_MAX or next(iter(self._unlinked.values())) < oldest
        ):
            self.forget(next(iter(self._unlinked)))
