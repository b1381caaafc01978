"""`reference/errors.md`: the tree of errors, with the meaning and the attributes of each."""

import inspect
from collections.abc import Iterator
from typing import Final

from docs.generate.markup import one_line, page
from storage import errors
from storage.cli.app import _exit_code
from storage.errors import StorageError
from storage.responses import ERRORS

STATUSES: Final = """
## Statuses

`storage.responses.error` makes the response to a client or another server, with the codes of the
[Client-Server API](https://spec.matrix.org/latest/client-server-api/#standard-error-response). The
first class that fits decides. An `InvalidEvent` that is too large is 413 `M_TOO_LARGE`. With
`for_member`, an unknown room is 403 `M_FORBIDDEN`: use it for requests that need a membership.

| Error | Status | `errcode` |
|---|---|---|
"""

INTRODUCTION: Final = """
# Errors

Every error that the library raises on purpose is a `StorageError`. Errors of the driver are
translated: a caller never gets one of asyncpg's. A PDU that is refused is no error: its
`AppendResult` has the outcome and the reason.

Attributes carry the ids, positions and names that are involved. Errors can be pickled. The command
line prints the message, and ends with the [exit code](cli.md#exit-codes) in parentheses.

## The tree
"""


def text() -> str:
    """Return the page."""
    tree = "\n".join(_tree(StorageError, 0))
    rows = "\n".join(f"| `{one.__name__}` | {status} | `{code}` |" for one, status, code in ERRORS)
    statuses = STATUSES.lstrip() + rows
    return page(INTRODUCTION, tree, statuses, "## Each error", *_sections(StorageError))


def _tree(error: type[StorageError], level: int) -> Iterator[str]:
    code = int(_exit_code(error.__new__(error)))
    meaning = one_line((error.__doc__ or "").split("\n\n")[0])
    yield f"{'    ' * level}- [`{error.__name__}`][storage.{error.__name__}] ({code}): {meaning}"
    for child in children(error):
        yield from _tree(child, level + 1)


def _sections(error: type[StorageError]) -> Iterator[str]:
    yield f"::: storage.{error.__name__}\n    options:\n      heading_level: 3"
    for child in children(error):
        yield from _sections(child)


def children(error: type[StorageError]) -> list[type[StorageError]]:
    """Return the public subclasses, in the order of the source."""
    public = [child for child in error.__subclasses__() if child.__module__ == errors.__name__]
    return sorted(public, key=lambda child: inspect.getsourcelines(child)[1])
