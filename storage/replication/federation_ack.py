"""Acknowledged positions of the workers that send to other servers (FEDERATION_ACK).

Data up to the lowest of them may be deleted. A worker whose link ended is remembered for a while,
because it continues from its position when it returns. After that it is ignored. So are the first
ones that left, where there are too many.
"""

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable

from storage.replication.commands import FederationAck

GONE_MAX = 1_000
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
        self._gone: OrderedDict[str, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def told(self, command: FederationAck) -> None:
        """Record an acknowledged position of a worker; an older one than before changes nothing."""
        self._drop_old()
        known = self._tokens.get(command.instance_name)
        self._tokens[command.instance_name] = (
            command.token if known is None else max(known, command.token)
        )
        self._gone.pop(command.instance_name, None)

    def lost(self, instance_names: Iterable[str]) -> None:
        """Record that the link of these workers has ended."""
        for name in instance_names:
            if name in self._tokens:
                self._gone[name] = self._clock()
                self._gone.move_to_end(name)
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
        self._gone.pop(instance_name, None)

    def _drop_old(self) -> None:
        oldest = self._clock() - self._keep_s
        while self._gone and (
            len(self._gone) > GONE_MAX or next(iter(self._gone.values())) < oldest
        ):
            self.forget(next(iter(self._gone)))
