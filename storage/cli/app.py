"""The list of commands, and how an error ends: one sentence on standard error and an exit code.

A traceback is never shown. To add a command, add a module of this package with a function `command`
(typer's options), and an entry of COMMANDS. The module is imported when its command is needed: that
takes a second, and `--version` imports none.
"""

import errno
import importlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import typer

from storage.cli import end_at_once, logs
from storage.cli.interrupt import Interrupted, handled, ignore_signals, interruptible
from storage.cli.logs import LogFormat, LogLevel
from storage.cli.output import ExitCode, PlainCommand, PlainGroup, print_json
from storage.errors import (
    ArchiveUnavailable,
    DatabaseError,
    InputError,
    InstanceNameTaken,
    PermissionRefused,
    StorageCorrupt,
    StorageError,
)

logger: logging.Logger = logging.getLogger(__name__)

CLOSED_PIPE: Final = 128 + signal.SIGPIPE
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write to standard output, as into a file on a full disk."""


class CliCommand(NamedTuple):
    """A command, its module, the panel of `--help` that lists it, and examples to copy."""

    name: str
    module: str
    panel: str
    examples: tuple[str, ...]


ROOM: Final = "'!room:example.org'"
BEGIN, SERVE, MOVE, INSPECT, CLEAN = (
    "Begin",
    "Run",
    "Rooms in and out",
    "Look",
    "Clean up and repair",
)
COMMANDS: Final = (
    CliCommand("demo", "demo", BEGIN, ("demo", "demo --dsn postgresql://localhost/test")),
    CliCommand("migrate", "migrate", BEGIN, ("migrate --list", "migrate --pre", "migrate")),
    CliCommand("jobs", "jobs", BEGIN, ("jobs --list", "jobs", "jobs --re-encode")),
    CliCommand(
        "serve",
        "serve",
        SERVE,
        ("serve --http-port 9193", "serve --no-tcp --redis redis://localhost"),
    ),
    CliCommand(
        "import",
        "import_files",
        MOVE,
        (
            "import rooms.ndjson --server-name example.org --rejects rejects.ndjson",
            "gunzip -c rooms.ndjson.gz | room-storage import -",
        ),
    ),
    CliCommand(
        "export",
        "export_file",
        MOVE,
        (f"export room.ndjson --room {ROOM}", "export - | gzip > rooms.ndjson.gz"),
    ),
    CliCommand("stats", "stats", INSPECT, ("stats", "stats --json | jq .counts")),
    CliCommand("inspect", "inspect_rooms", INSPECT, ("inspect", "inspect --port 0 --read-write")),
    CliCommand("verify", "verify", INSPECT, ("verify", f"verify --repair --room {ROOM}")),
    CliCommand(
        "explain",
        "explain",
        INSPECT,
        ("explain sync --user @alice:example.org", f"explain messages --room {ROOM} --generic"),
    ),
    CliCommand(
        "explain-visibility",
        "explain_visibility",
        INSPECT,
        (
            "explain-visibility '$event' @alice:example.org",
            "explain-visibility '$event' matrix.org",
        ),
    ),
    CliCommand("gc", "gc", CLEAN, ("gc", f"gc --room {ROOM}")),
    CliCommand("censor", "censor", CLEAN, ("censor --dry-run", "censor --older-than 30")),
    CliCommand(
        "archive",
        "archive",
        CLEAN,
        (
            "archive --older-than 90 --to /srv/room-archive --dry-run",
            "archive --older-than 90 --to s3://bucket/rooms",
            f"archive --back --room {ROOM}",
        ),
    ),
    CliCommand(
        "train-dictionary",
        "train_dictionary",
        CLEAN,
        ("train-dictionary --dry-run", "train-dictionary --events 50000"),
    ),
    CliCommand(
        "forget-user",
        "forget_user",
        CLEAN,
        (
            "forget-user @alice:example.org",
            "forget-user @alice:example.org --undo",
            "forget-user @alice:example.org --remove",
        ),
    ),
    CliCommand(
        "export-user",
        "export_user",
        CLEAN,
        ("export-user @alice:example.org alice",),
    ),
    CliCommand(
        "purge",
        "purge",
        CLEAN,
        (
            f"purge {ROOM} --before-date 2026-01-31 --dry-run",
            f"purge {ROOM} --all",
            "purge --retention --quiet",
            "purge --resume",
        ),
    ),
    CliCommand("rebuild-visibility", "rebuild_visibility", CLEAN, (f"rebuild-visibility {ROOM}",)),
)
SPARK: Final = CliCommand("spark", "spark", MOVE, ())


def _epilog(examples: Sequence[str]) -> str:
    lines = [
        example if "room-storage" in example else f"room-storage {example}" for example in examples
    ]
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)])


class CommandModules(Mapping[str, Any]):
    """The commands by name; a command is imported when it is looked up."""

    def __init__(self) -> None:
        self._listed = {listed.name: listed for listed in (*COMMANDS, SPARK)}
        self._loaded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._loaded:
            self._loaded[name] = _loaded(self._listed[name])
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._listed)

    def __len__(self) -> int:
        return len(self._listed)


def _loaded(one: CliCommand) -> Any:
    """Import a command, and make of it what typer would make of it in `app`."""
    with handled(end_at_once):
        module = importlib.import_module(f"storage.cli.{one.module}")
    alone = typer.Typer(callback=lambda: None)  # with a callback it is a group of one command
    if one is SPARK:
        alone.add_typer(module.app, name=one.name, rich_help_panel=one.panel)
    else:
        alone.command(
            one.name, cls=PlainCommand, rich_help_panel=one.panel, epilog=_epilog(one.examples)
        )(module.command)
    group: Any = typer.main.get_command(alone)
    return group.commands[one.name]


class ProgramGroup(PlainGroup):
    """The program: its commands are imported one at a time."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.commands = CommandModules()  # type: ignore[assignment]  # nobody adds to it

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002  # typer passes it
        """Return the names, in the order of the help."""
        return list(self.commands)


app: typer.Typer = typer.Typer(
    name="room-storage",
    cls=ProgramGroup,
    help=(
        "The rooms of a Matrix homeserver, on Postgres."
        " Exit codes: 0 done, 1 findings or damaged data, 2 bad usage, input or role,"
        " 3 no database, 130 SIGINT, 143 SIGTERM (serve and inspect: 0), 141 closed pipe."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(print_it: bool) -> None:
    if print_it:
        from storage.version import __version__  # noqa: PLC0415  # reading metadata takes time

        typer.echo(f"room-storage {__version__}")
        raise typer.Exit


@app.callback()
def room_storage(
    context: typer.Context,
    version: Annotated[  # noqa: ARG001  # its callback prints it
        bool,
        typer.Option(
            "--version",
            help="Print the version and exit.",
            callback=_print_version,
            is_eager=True,
        ),
    ] = False,
    log_level: Annotated[
        LogLevel | None,
        typer.Option(
            envvar="STORAGE_LOG_LEVEL",
            help=(
                "Log records from this level on;"
                " default: info for serve and inspect, warning for the others."
            ),
            show_default=False,
        ),
    ] = None,
    log_format: Annotated[
        LogFormat,
        typer.Option(envvar="STORAGE_LOG_FORMAT", help="The lines of the log, on standard error."),
    ] = LogFormat.TEXT,
) -> None:
    """Accept the options that stand before a command."""
    is_serving = context.invoked_subcommand in {"serve", "inspect"}
    default = LogLevel.INFO if is_serving else LogLevel.WARNING
    logs.begin(log_level or default, log_format)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Typer reports usage errors, with exit code 2."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with interruptible():
            app(words, prog_name="room-storage")
    except Interrupted as interrupted:
        ignore_signals()
        _print_end(interrupted.sentence)
        return int(str(interrupted.code))
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):  # Typer has made 1 of it: findings
            return CLOSED_PIPE
        return exit_.code if isinstance(exit_.code, int) else ExitCode.DONE
    except StorageError as error:
        _report(error, as_json="--json" in words)
        return _exit_code(error)
    except OSError as error:
        if error.errno not in FULL or error.filename is not None:
            raise
        _drop_output()
        _print_end(f"standard output: {error.strerror}", InputError())
        return ExitCode.USAGE
    finally:
        logs.end()
    return ExitCode.DONE


def _drop_output() -> None:
    """Drop what is left for standard output: at the end, Python would try again to write it."""
    with Path(os.devnull).open("wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _exit_code(error: StorageError) -> ExitCode:
    if isinstance(error, InstanceNameTaken | PermissionRefused):  # a repetition changes nothing
        return ExitCode.USAGE
    if isinstance(error, DatabaseError | ArchiveUnavailable):
        return ExitCode.UNAVAILABLE
    return ExitCode.FINDINGS if isinstance(error, StorageCorrupt) else ExitCode.USAGE


def _report(error: StorageError, *, as_json: bool) -> None:
    """Report an error: for people on standard error, for programs on standard output."""
    if as_json:
        print_json({"error": type(error).__name__, "message": str(error)})
    else:
        _print_end(str(error), error)


def _print_end(sentence: str, error: StorageError | None = None) -> None:
    """Print why a command ends to standard error, which has nothing but JSON if the log is JSON."""
    if logs.is_json():
        logger.error("%s", sentence, extra={"error": type(error).__name__} if error else None)
    else:
        typer.echo(sentence if error is None else f"error: {sentence}", err=True)
