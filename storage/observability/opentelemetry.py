"""Optional tracing by OpenTelemetry.

Install it with `pip install 'room-storage[tracing]'`, then call
`storage.observability.opentelemetry.enable()`.

Each call of the store is a span, for instance ``storage.append`` or ``storage.sync``. Each write of
the writer is a span of its own, ``storage.commit``, with links to its appends: many of them share
it. Attributes are ids of rooms and events, at most `IDS_MAX`, and numbers; never users, never
content. An error gives its class only. Before `enable`, and without the package, none of this
happens.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from storage.errors import ExtraMissing
from storage.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider

IDS_MAX: Final = 20
"""Ids of one kind that a span names."""


class Tracing:
    """The tracer of the process, if tracing is enabled.

    There is one per process, as with OpenTelemetry's own providers.
    """

    def __init__(self) -> None:
        self.tracer: Tracer | None = None

    def enable(self, tracer_provider: "TracerProvider | None" = None) -> None:
        """Make spans with this provider from now on, or with that of the process.

        Raise `ExtraMissing` without the package.
        """
        try:
            from opentelemetry import trace  # noqa: PLC0415  # an extra
        except ImportError:
            raise ExtraMissing("tracing", "tracing") from None
        self.tracer = trace.get_tracer("room-storage", __version__, tracer_provider=tracer_provider)

    def disable(self) -> None:
        """Make no more spans."""
        self.tracer = None

    @contextmanager
    def span(self, name: str, attributes: dict[str, Any]) -> Iterator["Span"]:
        """Open a span within that of the caller. Requires a `tracer`."""
        assert self.tracer is not None, "asked before"  # noqa: S101  # for the types
        opened = self.tracer.start_as_current_span(
            name, attributes=attributes, record_exception=False, set_status_on_exception=False
        )
        with opened as span, _failing(span):
            yield span

    @contextmanager
    def commit(
        self, callers: Iterable["SpanContext | None"], attributes: dict[str, Any]
    ) -> Iterator[None]:
        """Open the span of a write, which has no parent and links to those of its callers.

        Do nothing without a `tracer`.
        """
        if self.tracer is None:
            yield
            return
        from opentelemetry.context import Context  # noqa: PLC0415
        from opentelemetry.trace import Link  # noqa: PLC0415

        links = [Link(one) for one in callers if one is not None]
        span = self.tracer.start_span(
            "storage.commit", context=Context(), links=links, attributes=attributes
        )
        try:
            with _failing(span):
                yield
        finally:
            span.end()

    def name(self, room_ids: Iterable[str | None], event_ids: Iterable[str | None]) -> None:
        """Set the ids of the open span, once they are known."""
        from opentelemetry import trace  # noqa: PLC0415

        span = trace.get_current_span()
        span.set_attribute("matrix.room_ids", some(room_ids))
        span.set_attribute("matrix.event_ids", some(event_ids))

    def caller(self) -> "SpanContext | None":
        """Return the span that is open here, to link to it."""
        if self.tracer is None:
            return None
        from opentelemetry import trace  # noqa: PLC0415

        return trace.get_current_span().get_span_context()


def some(ids: Iterable[str | None]) -> list[str]:
    """Return as many of these ids as a span names, each once."""
    return list(dict.fromkeys(one for one in ids if isinstance(one, str)))[:IDS_MAX]


@contextmanager
def _failing(span: "Span") -> Iterator[None]:
    """Record an error by its class only: its message may contain user content."""
    try:
        yield
    except Exception:
        from opentelemetry.trace import StatusCode  # noqa: PLC0415

        error = sys.exc_info()[0]
        name = "" if error is None else error.__name__
        span.set_attribute("error.type", name)
        span.set_status(StatusCode.ERROR, name)
        raise


tracing: Final = Tracing()
enable: Final = tracing.enable
disable: Final = tracing.disable
