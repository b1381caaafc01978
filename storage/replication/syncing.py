"""Who is syncing, on which worker, with which device: kept by whoever computes presence, told by USER_SYNC and CLEAR_USER_SYNC.

A worker's users are gone when it says so, when the link it spoke over ends, when it comes back over another link (it tells
its users again), and, where all share one link, when it has not been heard of for a while.
"""

from storage.replication.commands import UserSync

Session = tuple[str, str | None]
"""A user and a device; None: the worker did not tell."""


class Syncing:
    """The sessions of each worker."""

    def __init__(self) -> None:
        self._sessions: dict[str, dict[Session, int]] = {}
        self._links: dict[str, object] = {}

    def told(self, command: UserSync, link: object) -> None:
        """A worker tells of one user."""
        if self._links.get(command.instance_name) is not link:
            self.clear(command.instance_name)
            self._links[command.instance_name] = link
        sessions = self._sessions.setdefault(command.instance_name, {})
        sessions.pop((command.user_id, command.device_id), None)
        if command.is_syncing:
            sessions[command.user_id, command.device_id] = command.last_sync_ms

    def clear(self, instance_name: str) -> None:
        """Nobody syncs on this worker any more."""
        self._sessions.pop(instance_name, None)
        self._links.pop(instance_name, None)

    def lost(self, link: object) -> None:
        """A link has ended, and the workers that spoke over it with it."""
        for instance_name in [name for name, own in self._links.items() if own is link]:
            self.clear(instance_name)

    def users(self) -> set[str]:
        """Everybody who is syncing."""
        return {user_id for sessions in self._sessions.values() for user_id, _ in sessions}

    def is_syncing(self, user_id: str) -> bool:
        """Whether this user is syncing anywhere."""
        return user_id in self.users()

    def workers(self) -> dict[str, set[Session]]:
        """Who is syncing on each worker that has told of anybody."""
        return {name: set(sessions) for name, sessions in self._sessions.items()}

    def last_sync_ms(self, user_id: str) -> int | None:
        """When this user's latest sync began; None if the user is not syncing."""
        return max(
            (at for sessions in self._sessions.values() for (user, _), at in sessions.items() if user == user_id),
            default=None,
        )
