"""Instrumentation of the store's calls: duration, errors, and a span if tracing is enabled."""

import inspect
from collections.abc import Callable, Collection, Coroutine
from functools import wraps
from time import perf_counter
from typing import Any, Concatenate, Final, ParamSpec, Protocol, TypeVar

from storage.observability.counters import Measures
from storage.observability.opentelemetry import some, tracing

P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S", bound="Measured")

ROOMS: Final = ("room_id", "room_ids")
EVENTS: Final = ("event_id", "event_ids", "from_ids", "latest")
MEASURED: Final[set[str]] = set()
"""The names of all measured calls."""


class Measured(Protocol):
    """An object whose calls are measured."""

    @property
    def measures(self) -> Measures:
        """Return the counters to add to."""


def measured(
    name: str, *, timed: bool = True
) -> Callable[
    [Callable[Concatenate[S, P], Coroutine[Any, Any, R]]],
    Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
]:
    """Decorate methods that are calls of the store.

    ``timed`` False: the method times itself, because it also waits.
    """
    MEASURED.add(name)

    def around(
        method: Callable[Concatenate[S, P], Coroutine[Any, Any, R]],
    ) -> Callable[Concatenate[S, P], Coroutine[Any, Any, R]]:
        signature = inspect.signature(method)

        @wraps(method)
        async def call(self: S, *args: P.args, **kwargs: P.kwargs) -> R:
            measures = self.measures
            began = perf_counter()
            try:
                if tracing.tracer is None:
                    return await method(self, *args, **kwargs)
                with tracing.span(
                    f"storage.{name}", _ids(signature.bind(self, *args, **kwargs).arguments)
                ):
                    return await method(self, *args, **kwargs)
            except Exception as error:
                measures.call_errors[name, type(error).__name__] += 1
                raise
            finally:
                if timed:
                    measures.call(name).add(perf_counter() - began)

        return call  # type: ignore[return-value]  # `self` is not named in the type

    return around


def _ids(arguments: dict[str, Any]) -> dict[str, Any]:
    """Return the room and event ids in the arguments, without consuming iterators."""
    found: dict[str, list[str]] = {}
    for attribute, names in (("matrix.room_ids", ROOMS), ("matrix.event_ids", EVENTS)):
        for name in names:
            value = arguments.get(name)
            given = (
                [value]
                if isinstance(value, str)
                else value
                if isinstance(value, Collection)
                else ()
            )
            found.setdefault(attribute, []).extend(some(given))
    return {attribute: ids for attribute, ids in found.items() if ids}
