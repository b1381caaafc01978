"""The links of worker names: one link cannot change what another has sent for a worker.

A name belongs to a link from the first command with the name until the link ends. Another link that
uses the name is refused. The exception is a first link that was silent for two pings: then the
worker is back over a new connection, and the old one is ended. If one link has too many names, the
oldest are dropped.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable

from storage.errors import ProtocolError
from storage.replication.transport import Link

logger: logging.Logger = logging.getLogger(__name__)


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
