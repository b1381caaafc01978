"""Turn failures in executors into our errors. Spark returns them as text, a trace in a trace."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final, cast

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from storage import errors
from storage.errors import (
    CommitUnknown,
    DatabaseConflict,
    DatabaseError,
    DatabaseFull,
    DatabaseUnavailable,
    InputError,
    InstanceNameTaken,
    PermissionRefused,
    StorageError,
)

RAISED: Final = re.compile(r"^(?:E?\s*)storage\.errors\.(\w+): (.+)$", re.MULTILINE)
CAUSED: Final = re.compile(r"^(?:Caused by: )(?:[\w$]+\.)*([\w$]+: .+)$", re.MULTILINE)
LENGTH_MAX: Final = 500
OF_THE_DATABASE: Final = (
    DatabaseUnavailable,
    DatabaseFull,
    DatabaseConflict,
    CommitUnknown,
    InstanceNameTaken,
    PermissionRefused,
)


@contextmanager
def executor_errors() -> Iterator[None]:
    """Raise our error instead of Spark's: the executor's, or a `StorageError` with its cause."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise of_text(str(error)) from error


def of_text(text: str) -> StorageError:
    """Return the error at the end of a trace, in its own class if that takes a text."""
    found = RAISED.findall(text)
    if not found:
        causes: list[str] = CAUSED.findall(text)
        return StorageError(
            f"Spark: {(causes[-1] if causes else text.strip().partition(chr(10))[0])[:LENGTH_MAX]}"
        )
    name, reason = found[-1]
    message = f"{name} in an executor: {reason[:LENGTH_MAX]}"
    kind = getattr(errors, name, StorageError)
    if kind in OF_THE_DATABASE:
        return cast("StorageError", kind(message))
    if issubclass(kind, DatabaseError):
        return DatabaseError(message)
    return (InputError if issubclass(kind, InputError) else StorageError)(message)
