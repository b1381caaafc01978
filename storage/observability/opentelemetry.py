"""Tracing by OpenTelemetry, for who wants it: `pip install 'room-event-storage[tracing]'`, then `storage.observability.opentelemetry.enable()`.

Each call of the store is a span, ``storage.append`` or ``storage.sync`` for instance, and each write of the writer is one of its own,
``storage.commit``, with links to the appends that it is for: many of them share it. Attributes are ids of rooms and events, at most `IDS_MAX`,
and numbers; never users, never content. An error gives its class only. Before `enable`, and without the package, none of this happens.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from storage.errors import InputError

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider

IDS_MAX: Final = 20
"""Ids of one kind that a span names."""


class Tracing:
    """Whether spans are made, and by whom.

    One for the process, as OpenTelemetry's own providers are.
    """

    def __init__(self) -> None:
        self.tracer: Tracer | None = None

    def enable(self, tracer_provider: "TracerProvider | None" = None) -> None:
        """From now on, spans are made by this provider, or by that of the process.

        `InputError` without the package.
        """
        try:
            from opentelemetry import trace  # noqa: PLC0415  # an extra
        except ImportError as error:
            raise InputError(
                f"tracing needs the extra: pip install 'room-event-storage[tracing]' ({error})"
            ) from None
        self.tracer = trace.get_tracer("room-event-storage", tracer_provider=tracer_provider)

    def disable(self) -> None:
        """No more spans."""
        self.tracer = None

    @contextmanager
    def span(self, name: str, attributes: dict[str, Any]) -> Iterator["Span"]:
        """A span within that of the caller. Only where there is a `tracer`."""
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
        """The span of a write, which stands alone and is linked to those of its callers.

        Does nothing without a `tracer`.
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
        """The ids that the open span is about, as they have turned out."""
        from opentelemetry import trace  # noqa: PLC0415

        span = trace.get_current_span()
        span.set_attribute("matrix.room_ids", some(room_ids))
        span.set_attribute("matrix.event_ids", some(event_ids))

    def caller(self) -> "SpanContext | None":
        """The span that is open here, to be linked to."""
        if self.tracer is None:
            return None
        from opentelemetry import trace  # noqa: PLC0415

        return trace.get_current_span().get_span_context()


def some(ids: Iterable[str | None]) -> list[str]:
    """As many of these ids as a span names, each once."""
    return list(dict.fromkeys(one for one in ids if isinstance(one, str)))[:IDS_MAX]


@contextmanager
def _failing(span: "Span") -> Iterator[None]:
    """An error is told by its class: its words may have been made of what somebody sent."""
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
enable = tracing.enable
disable = tracing.disable
