"""The value of `storage.open`: a store that is not open before `async with`.

A store that is used without it has no attributes. The error says what to write.
"""

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import wraps
from inspect import signature
from types import TracebackType
from typing import Final, NoReturn, ParamSpec

from storage.store.facade import Store

P = ParamSpec("P")

WRITE: Final = "write `async with storage.open(…) as store:`"


class UnopenedStore(AbstractAsyncContextManager[Store]):
    """A context manager whose block has the open store."""

    def __init__(self, opening: AbstractAsyncContextManager[Store]) -> None:
        self._opening = opening

    async def __aenter__(self) -> Store:
        return await self._opening.__aenter__()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        return await self._opening.__aexit__(kind, error, trace)

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"the store is not open, so it has no {name!r}: {WRITE}")

    def __await__(self) -> NoReturn:
        raise TypeError(f"storage.open cannot be awaited: {WRITE}")


def unopened(
    open_: Callable[P, AbstractAsyncContextManager[Store]],
) -> Callable[P, AbstractAsyncContextManager[Store]]:
    """Decorate a function that opens a store."""

    @wraps(open_)
    def call(*args: P.args, **kwargs: P.kwargs) -> AbstractAsyncContextManager[Store]:
        return UnopenedStore(open_(*args, **kwargs))

    # for `help`: the annotation of the generator says nothing of `async with`
    returned = AbstractAsyncContextManager[Store]
    call.__annotations__ = {**call.__annotations__, "return": returned}
    call.__signature__ = signature(open_).replace(return_annotation=returned)  # type: ignore[attr-defined]
    return call
