"""The longest work of a process between two turns of its event loop, in CPU time.

Wall time would count what other processes did meanwhile.
"""

import asyncio
from time import thread_time
from typing import Self


class Heartbeat:
    """Beats once in each turn of the loop, while the block runs. ``longest`` is in seconds."""

    def __init__(self) -> None:
        self.longest = 0.0
        self.turns = 0
        self._is_over = False
        self._last = 0.0

    async def __aenter__(self) -> Self:
        self._last = thread_time()
        self._beat()
        await asyncio.sleep(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.sleep(0)  # so that the last work counts
        self._is_over = True

    @property
    def longest_ms(self) -> float:
        """Return the longest work in milliseconds."""
        return round(self.longest * 1000, 1)

    def _beat(self) -> None:
        now = thread_time()
        self.longest = max(self.longest, now - self._last)
        self._last = now
        self.turns += 1
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._beat)
