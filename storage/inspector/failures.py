"""An error as a page: its cause, the next step, and the form with what was entered.

While the database does not answer, the page is loaded again by itself. So it recovers without a
click, also without JavaScript.
"""

import logging
from typing import Final, NamedTuple

from starlette.responses import Response

from storage.errors import (
    DatabaseError,
    InputError,
    PermissionRefused,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    UnknownEvent,
    UnknownRoom,
    UnknownUser,
)
from storage.inspector.visit import ContentRefusedError, Visit

logger: logging.Logger = logging.getLogger(__name__)

AGAIN_SECONDS: Final = 2
"""After so many seconds a browser loads the page again while the database is down."""


class Failure(NamedTuple):
    """The text of the page of an error. ``again``: the page is loaded again by itself."""

    status: int
    title: str
    next_step: str
    again: bool = False


NOT_STORED: Final = Failure(
    404, "It is not stored here", "Check the id. A purge, or a room that was left, removes events."
)
INPUT: Final = Failure(400, "This cannot be shown", "Correct the entry, and try again.")
DOWN: Final = Failure(
    503,
    "The database does not answer",
    "This page tries again by itself. Nothing is lost.",
    again=True,
)
REFUSED_BY_ROLE: Final = Failure(
    403, "The role of the database lacks a privilege", "See the how-to on roles."
)
CORRUPT: Final = Failure(500, "The store contradicts itself", "Run `room-storage verify`.")
NO_CONTENT: Final = Failure(
    403, "You may not see the content of events", "The homeserver decides who may."
)
DEFECT: Final = Failure(500, "This page has failed", "The log of the process has the reason.")


def failure_of(error: Exception) -> Failure:
    """Return what to say of an error."""
    if isinstance(error, UnknownEvent | UnknownRoom | UnknownUser):
        return NOT_STORED
    if isinstance(error, InputError):
        return INPUT
    if isinstance(error, PermissionRefused):
        return REFUSED_BY_ROLE
    if isinstance(error, DatabaseError | StorageClosed):
        return DOWN
    if isinstance(error, StorageCorrupt):
        return CORRUPT
    return NO_CONTENT if isinstance(error, ContentRefusedError) else DEFECT


def failed(visit: Visit, error: Exception) -> Response:
    failure = failure_of(error)
    if failure is DEFECT:
        logger.error("%s failed", visit.request.url.path, exc_info=error)
    reason = str(error) if isinstance(error, StorageError) else ""
    answer = visit.render("failure.html", status=failure.status, failure=failure, reason=reason)
    if failure.again:
        answer.headers["Refresh"] = str(AGAIN_SECONDS)
    return answer
