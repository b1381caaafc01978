"""The syncing users and devices of each worker, from USER_SYNC and CLEAR_USER_SYNC, for presence.

A worker's users are removed when it says so, when its link ends, or when it returns over another
link and sends its users again. Where all share one link, they are removed after a silence.
"""

import logging

from storage.errors import ProtocolError
from storage.replication.commands import UserSync

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

    def told(self, command: UserSync, link: object) -> None:
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
