"""The slow path: appends together, then each alone, then the parts of one.

A constraint refuses a whole write. If one append alone is refused, it is written in halves, and the
half that is refused in halves again. So a single event remains, which gets the outcome "invalid",
and all others are stored. That takes about 4 * log2(events) writes for such an event.

An event that is built here fails its append instead: its sender gets the error.
"""

import logging
from collections.abc import Sequence
from typing import Final

from storage.database.translate import refused_row
from storage.errors import DatabaseFull
from storage.event import Event
from storage.persist.commit.requests import AppendRequest, WriteBatch
from storage.persist.commit.retry import Part, WriteAttempts
from storage.persist.model.incoming import IncomingEvent
from storage.persist.model.results import AppendResult
from storage.streams.in_flight import LOST

logger: Final = logging.getLogger(__name__)


async def serve(
    attempts: WriteAttempts, requests: Sequence[AppendRequest], failed: WriteBatch | None = None
) -> None:
    """Serve these appends together. ``failed`` is their last batch, if it failed.

    If one append fails, each is served alone, and only the failing ones get the error. If the
    connection is lost or the disk is full, all of them fail.
    """
    error = await _error(attempts, [(request, request.rest) for request in requests], failed)
    if error is None:
        return
    if isinstance(error, (*LOST, DatabaseFull)):
        for request in requests:
            request.fail(error)
    elif len(requests) == 1:
        await _serve_parts(attempts, requests[0], len(requests[0].rest), error)
    else:
        for request in requests:
            await serve(attempts, [request])


async def _error(
    attempts: WriteAttempts, parts: Sequence[Part], failed: WriteBatch | None = None
) -> Exception | None:
    try:
        await attempts.serve(parts, failed)
    except Exception as error:  # noqa: BLE001  # any error is the result of the append
        return error
    return None


async def _serve_parts(
    attempts: WriteAttempts, request: AppendRequest, count: int, error: Exception
) -> None:
    """Serve the next ``count`` events, which were refused with ``error``, in two halves."""
    reason = refused_row(error)
    events = [one.event for one in request.rest[:count] if isinstance(one, IncomingEvent)]
    if reason is None or len(events) < count:
        request.fail(error)
    elif count == 1:
        attempts.measures.unwritable_events += 1
        request.answer([_unwritable(events[0], reason)])
    else:
        for half in (count // 2, count - count // 2):
            if request.is_over:
                return
            refused = await _error(attempts, [(request, request.rest[:half])])
            if refused is not None:
                await _serve_parts(attempts, request, half, refused)


def _unwritable(event: Event, reason: str) -> AppendResult:
    """Log an event that is not stored, without its content, and return its result."""
    logger.error(
        "the database refuses the event %s: %s; run `room-storage verify --repair`, and report it "
        "if that finds nothing",
        event.event_id,
        reason,
        extra={"event_id": event.event_id, "room_id": event.room_id, "constraint": reason},
    )
    return AppendResult(event.event_id, "invalid", f"the database refuses it: {reason}")
