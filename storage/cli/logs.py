"""The log of a command: lines of text or JSON on standard error, with time and level.

`room-storage --log-level info --log-format json serve` sets both; the library itself only uses
loggers of the standard library. A warning that is repeated passes once a minute, with the number of
repetitions. Without a library for JSON logs: the formatter is ten lines, and orjson is here.
"""

import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Final

LIMIT_SECONDS: Final = 60.0
"""A warning with the same text passes once in this time."""

TEXTS_MAX: Final = 1_000
"""Most texts that are remembered; above it a warning passes."""

STANDARD: Final = {*vars(logging.makeLogRecord({})), "message", "asctime", "taskName"}
"""The attributes of each record. The others are ids, given as `extra`."""


class LogLevel(StrEnum):
    """The least important records that are logged."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


class LogFormat(StrEnum):
    """The form of a line of the log."""

    TEXT = "text"
    JSON = "json"


def begin(level: LogLevel, log_format: LogFormat) -> None:
    """Log to standard error from now on. A second call replaces the first."""
    end()
    lines = logging.StreamHandler(sys.stderr)
    lines.setFormatter(JsonLines() if log_format is LogFormat.JSON else TextLines())
    logging.getLogger().addHandler(LimitRepeated(lines))
    logging.getLogger("storage").setLevel(level.upper())
    logging.captureWarnings(capture=True)  # of the warnings module: they are lines of the log, too
    logging.getLogger("py.warnings").addFilter(without_source)


def end() -> None:
    """Undo `begin`."""
    root = logging.getLogger()
    for handler in [limiter for limiter in root.handlers if isinstance(limiter, LimitRepeated)]:
        root.removeHandler(handler)
        handler.close()
        logging.captureWarnings(capture=False)
        logging.getLogger("py.warnings").removeFilter(without_source)
    logging.getLogger("storage").setLevel(logging.NOTSET)


def without_source(record: logging.LogRecord) -> bool:
    """Drop the line of source that follows a warning of the warnings module."""
    record.msg, record.args = record.getMessage().partition("\n")[0], ()
    return True


def is_json() -> bool:
    """Return whether the log of this process is JSON."""
    return any(
        isinstance(handler, LimitRepeated) and isinstance(handler.lines.formatter, JsonLines)
        for handler in logging.getLogger().handlers
    )


def ids(record: logging.LogRecord) -> dict[str, object]:
    """Return the attributes that the caller added: room_id, event_id and others."""
    return {name: value for name, value in vars(record).items() if name not in STANDARD}


def time_of(record: logging.LogRecord) -> str:
    """Return the time in UTC, with milliseconds: 2026-01-31T23:59:59.123Z."""
    moment = datetime.fromtimestamp(record.created, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


class TextLines(logging.Formatter):
    """Time, level, logger, message and ids; a traceback follows on lines of its own."""

    def format(self, record: logging.LogRecord) -> str:
        text = " ".join(
            [record.getMessage(), *(f"{name}={value}" for name, value in ids(record).items())]
        )
        line = f"{time_of(record)} {record.levelname} {record.name}: {text}"
        return line if not record.exc_info else f"{line}\n{self.formatException(record.exc_info)}"


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, ids, and the traceback as text."""

    def format(self, record: logging.LogRecord) -> str:
        import orjson  # noqa: PLC0415  # for this format only

        own: dict[str, object] = {
            "time": time_of(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        values = own | ids(record) | own
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return orjson.dumps(values, default=str, option=orjson.OPT_NON_STR_KEYS).decode()


@dataclass(slots=True)
class Repetitions:
    """A warning that has passed, and how often it was repeated."""

    record: logging.LogRecord
    first: float
    last: float
    count: int = 0


class LimitRepeated(logging.Handler):
    """Passes records to ``lines``; of a repeated warning the first, and later the number.

    The number is logged with the first record after `LIMIT_SECONDS`, or at the end.
    """

    def __init__(self, lines: logging.Handler, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self.lines = lines
        self._clock = clock
        self._passed: dict[tuple[str, str], Repetitions] = {}  # the oldest first

    def emit(self, record: logging.LogRecord) -> None:
        """Pass a record, or count it."""
        try:
            self._pass_or_count(record)
        except Exception:  # noqa: BLE001  # a log call must not fail its caller
            self.handleError(record)

    def close(self) -> None:
        """Log the numbers that are left."""
        self._report(before=float("inf"))
        super().close()

    def _pass_or_count(self, record: logging.LogRecord) -> None:
        now = self._clock()
        self._report(before=now - LIMIT_SECONDS)
        text = record.name, record.getMessage()
        repetitions = self._passed.get(text)
        if repetitions is not None:
            repetitions.count, repetitions.last = repetitions.count + 1, now
            return
        if record.levelno >= logging.WARNING and len(self._passed) < TEXTS_MAX:
            self._passed[text] = Repetitions(record, now, now)
        self.lines.handle(record)

    def _report(self, *, before: float) -> None:
        """Forget the warnings that first came before this moment; log how often they came."""
        for text, repetitions in list(self._passed.items()):
            if repetitions.first > before:
                break
            del self._passed[text]
            if repetitions.count:
                self.lines.handle(repeated(repetitions))


def repeated(repetitions: Repetitions) -> logging.LogRecord:
    """Return the record that gives the number of repetitions."""
    times = "once" if repetitions.count == 1 else f"{repetitions.count} times"
    seconds = repetitions.last - repetitions.first
    return logging.makeLogRecord(
        {
            "name": repetitions.record.name,
            "levelno": repetitions.record.levelno,
            "levelname": repetitions.record.levelname,
            "msg": "repeated %s in %.1f s: %s",
            "args": (times, seconds, repetitions.record.getMessage()),
        }
    )
