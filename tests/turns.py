"""LoopTurns of the event loop, and how much of something is done between two of them."""

import asyncio
from collections.abc import Callable
from typing import Any, Self

import pytest


class LoopTurns:
    """Counts the turns while the block runs, and the most units that `note` got within one."""

    def __init__(self) -> None:
        self.number = 0
        self.most = 0
        self.total = 0
        self._now = 0
        self._is_over = False

    async def __aenter__(self) -> Self:
        self._beat()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._is_over = True

    def note(self, units: int = 1) -> None:
        """Note work of this turn."""
        self._now += units
        self.total += units
        self.most = max(self.most, self._now)

    def watch(
        self,
        patch: pytest.MonkeyPatch,
        place: Any,
        name: str,
        units: Callable[..., int] = lambda *_: 1,
    ) -> None:
        """Note each call of a function of a module or class; ``units`` gets its arguments."""
        called = getattr(place, name)

        def watched(*args: Any, **how: Any) -> Any:
            self.note(units(*args))
            return called(*args, **how)

        patch.setattr(place, name, watched)

    def _beat(self) -> None:
        self.number += 1
        self._now = 0
        if not self._is_over:
            asyncio.get_running_loop().call_soon(self._beat)
