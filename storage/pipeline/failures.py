"""What failed in an executor, as one of our errors: Spark brings it back as text, a trace within a trace."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from py4j.protocol import Py4JError
from pyspark.errors import PySparkException

from storage import errors
from storage.errors import DatabaseError, InputError, StorageError

RAISED: Final = re.compile(r"^(?:E?\s*)storage\.errors\.(\w+): (.+)$", re.MULTILINE)
LENGTH_MAX: Final = 500


@contextmanager
def told() -> Iterator[None]:
    """Our error for one of Spark's: the one that an executor raised, else a `StorageError` with the first line."""
    try:
        yield
    except (PySparkException, Py4JError) as error:
        raise of_text(str(error)) from error


def of_text(text: str) -> StorageError:
    """The error that a trace ends with."""
    found = RAISED.findall(text)
    if not found:
        return StorageError(f"Spark: {text.strip().partition(chr(10))[0][:LENGTH_MAX]}")
    name, reason = found[-1]
    kind = getattr(errors, name, StorageError)
    if issubclass(kind, DatabaseError):
        return DatabaseError(f"{name} in an executor: {reason[:LENGTH_MAX]}")
    return (InputError if issubclass(kind, InputError) else StorageError)(f"{name} in an executor: {reason[:LENGTH_MAX]}")
