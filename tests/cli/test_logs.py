"""The log of commands: time and level, as text or JSON; repeated warnings are limited."""

import io
import json
import logging
import re
from collections.abc import Iterator

import pytest

from storage.cli import logs, main
from storage.cli.logs import LogFormat, LogLevel
from tests.cli.running import NOBODY, room_storage
from tests.operating.test_outages import Clock

TIME = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"


class KeptLog:
    """A logger whose lines are kept."""

    def __init__(self, formatter: logging.Formatter) -> None:
        self._written = io.StringIO()
        lines = logging.StreamHandler(self._written)
        lines.setFormatter(formatter)
        self.clock = Clock()
        self.handler = logs.LimitRepeated(lines, self.clock)
        self.logger = logging.Logger("storage.somewhere")  # noqa: LOG001  # not known to others
        self.logger.addHandler(self.handler)

    @property
    def lines(self) -> list[str]:
        return self._written.getvalue().splitlines()

    @property
    def messages(self) -> list[str]:
        return [json.loads(line)["message"] for line in self.lines]


@pytest.fixture
def log() -> KeptLog:
    return KeptLog(logs.JsonLines())


def test_text_has_time_level_logger_and_ids() -> None:
    log = KeptLog(logs.TextLines())
    log.logger.info("%s: %s", "rejected", "$event", extra={"room_id": "!r:s1", "rule": None})
    [line] = log.lines
    assert re.fullmatch(
        TIME + r" INFO storage\.somewhere: rejected: \$event room_id=!r:s1 rule=None", line
    )


def test_json_has_the_same_and_one_line_each(log: KeptLog) -> None:
    ids = {"room_id": "!r:s1", "level": "mine", "other": {1: object}}
    log.logger.warning("two\nlines", extra=ids)
    try:
        raise KeyError("x")  # noqa: TRY301
    except KeyError:
        log.logger.exception("failed")
    said, failed = (json.loads(line) for line in log.lines)
    assert re.fullmatch(TIME, said.pop("time"))
    assert said == {
        "level": "warning",
        "logger": "storage.somewhere",
        "message": "two\nlines",
        "room_id": "!r:s1",
        "other": {"1": "<class 'object'>"},
    }
    assert failed["level"] == "error"
    assert failed["exception"].endswith("KeyError: 'x'")


def test_a_repeated_warning_passes_once_a_minute(log: KeptLog) -> None:
    for _ in range(3):
        for _ in range(120):
            log.logger.warning("no connection with %s", "Redis")
            log.clock.now += 0.5
    log.clock.now += 60
    log.logger.info("something else")
    first, counted = (
        "no connection with Redis",
        "repeated 119 times in 59.5 s: no connection with Redis",
    )
    assert log.messages == [first, counted] * 3 + ["something else"]


def test_the_number_is_told_at_the_end(log: KeptLog) -> None:
    for _ in range(2):
        log.logger.error("no")
        log.logger.error("yes")
    log.handler.close()
    assert log.messages == [
        "no",
        "yes",
        "repeated once in 0.0 s: no",
        "repeated once in 0.0 s: yes",
    ]
    assert {json.loads(line)["level"] for line in log.lines} == {"error"}


def test_what_is_new_passes(log: KeptLog) -> None:
    """Other texts, other loggers, and everything below a warning."""
    for number in range(logs.TEXTS_MAX + 10):
        log.logger.warning("row %d", number)
    for _ in range(3):
        log.logger.info("connected")
    assert len(log.lines) == logs.TEXTS_MAX + 10 + 3


def test_a_wrong_call_does_not_fail_its_caller(
    log: KeptLog, capsys: pytest.CaptureFixture[str]
) -> None:
    log.logger.warning("%d rows", "no")
    assert "--- Logging error ---" in capsys.readouterr().err


@pytest.fixture
def storage_logger() -> Iterator[logging.Logger]:
    logger = logging.getLogger("storage")
    level, handlers = logger.level, list(logging.getLogger().handlers)
    yield logger
    assert (logger.level, logging.getLogger().handlers) == (level, handlers)


@pytest.mark.parametrize("level", LogLevel)
def test_the_level_is_that_of_our_loggers(
    storage_logger: logging.Logger, capsys: pytest.CaptureFixture[str], level: LogLevel
) -> None:
    logs.begin(level, LogFormat.TEXT)
    try:
        for each in LogLevel:
            storage_logger.log(logging.getLevelName(each.upper()), "said at %s", each)
            logging.getLogger("another.library").debug("not ours")
    finally:
        logs.end()
    lines = capsys.readouterr().err.splitlines()
    assert [line.split()[-1] for line in lines] == list(LogLevel)[list(LogLevel).index(level) :]


def test_a_command_undoes_its_settings(storage_logger: logging.Logger) -> None:
    assert storage_logger.level == logging.NOTSET
    assert main(["--log-level", "debug", "migrate", "--dsn", "mysql://x"]) == 2


@pytest.mark.parametrize("how", ["option", "variable"])
def test_the_error_of_a_command_is_json_too(how: str) -> None:
    arguments = ["--log-format", "json"] if how == "option" else []
    environ = {} if how == "option" else {"STORAGE_LOG_FORMAT": "json"}
    done = room_storage(*arguments, "stats", "--dsn", NOBODY, given=b"", **environ)
    [line] = done.stderr.splitlines()
    told = json.loads(line)
    assert (done.returncode, told["level"], told["error"]) == (3, "error", "DatabaseUnavailable")


@pytest.mark.parametrize(
    "environ",
    [{"STORAGE_LOG_LEVEL": "loud"}, {"STORAGE_LOG_FORMAT": "xml"}],
    ids=["level", "format"],
)
def test_a_wrong_setting_is_named(environ: dict[str, str]) -> None:
    done = room_storage("stats", "--dsn", NOBODY, given=b"", **environ)
    assert done.returncode == 2
    assert next(iter(environ)) in done.stderr
