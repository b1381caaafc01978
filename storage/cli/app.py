"""The list of commands, and how an error ends: one sentence on standard error and an exit code.

A traceback is never shown. To add a command, add a module of this package with a function `command`
(typer's options), and an entry of COMMANDS.
"""

import errno
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from storage.cli import (
    archive,
    censor,
    demo,
    explain,
    explain_visibility,
    export_file,
    export_user,
    forget_user,
    gc,
    import_files,
    inspect_rooms,
    jobs,
    logs,
    migrate,
    purge,
    rebuild_visibility,
    serve,
    spark,
    stats,
    train_dictionary,
    verify,
)
from storage.cli.common import ExitCode, PlainCommand, PlainGroup, print_json
from storage.cli.interrupt import Interrupted, ignore_signals, interruptible
from storage.cli.logs import LogFormat, LogLevel
from storage.errors import (
    ArchiveUnavailable,
    DatabaseError,
    InputError,
    InstanceNameTaken,
    PermissionRefused,
    StorageCorrupt,
    StorageError,
)
from storage.version import __version__

logger: logging.Logger = logging.getLogger(__name__)

CLOSED_PIPE: Final = 128 + signal.SIGPIPE
FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of a write to standard output, as into a file on a full disk."""

app: typer.Typer = typer.Typer(
    name="room-storage",
    cls=PlainGroup,
    help=(
        "The rooms of a Matrix homeserver, on Postgres."
        " Exit codes: 0 done, 1 findings or damaged data, 2 bad usage, input or role,"
        " 3 no database, 130 SIGINT, 143 SIGTERM (serve and inspect: 0), 141 closed pipe."
    ),
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
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


class CliCommand(NamedTuple):
    """A command, the panel of `--help` that lists it, and examples to copy."""

    name: str
    function: Callable[..., None]
    panel: str
    examples: tuple[str, ...]


ROOM: Final = "'!room:example.org'"
BEGIN, SERVE, MOVE, LOOK, CLEAN = "Begin", "Run", "Rooms in and out", "Look", "Clean up and repair"
COMMANDS: Final = (
    CliCommand("demo", demo.command, BEGIN, ("demo", "demo --dsn postgresql://localhost/test")),
    CliCommand("migrate", migrate.command, BEGIN, ("migrate --list", "migrate --pre", "migrate")),
    CliCommand("jobs", jobs.command, BEGIN, ("jobs --list", "jobs", "jobs --re-encode")),
    CliCommand(
        "serve",
        serve.command,
        SERVE,
        ("serve --http-port 9193", "serve --no-tcp --redis redis://localhost"),
    ),
    CliCommand(
        "import",
        import_files.command,
        MOVE,
        (
            "import rooms.ndjson --server-name example.org --rejects rejects.ndjson",
            "gunzip -c rooms.ndjson.gz | room-storage import -",
        ),
    ),
    CliCommand(
        "export",
        export_file.command,
        MOVE,
        (f"export room.ndjson --room {ROOM}", "export - | gzip > rooms.ndjson.gz"),
    ),
    CliCommand("stats", stats.command, LOOK, ("stats", "stats --json | jq .counts")),
    CliCommand(
        "inspect", inspect_rooms.command, LOOK, ("inspect", "inspect --port 0 --read-write")
    ),
    CliCommand("verify", verify.command, LOOK, ("verify", f"verify --repair --room {ROOM}")),
    CliCommand(
        "explain",
        explain.command,
        LOOK,
        ("explain sync --user @alice:example.org", f"explain messages --room {ROOM} --generic"),
    ),
    CliCommand(
        "explain-visibility",
        explain_visibility.command,
        LOOK,
        (
            "explain-visibility '$event' @alice:example.org",
            "explain-visibility '$event' matrix.org",
        ),
    ),
    CliCommand("gc", gc.command, CLEAN, ("gc", f"gc --room {ROOM}")),
    CliCommand("censor", censor.command, CLEAN, ("censor --dry-run", "censor --older-than 30")),
    CliCommand(
        "archive",
        archive.command,
        CLEAN,
        (
            "archive --older-than 90 --to /srv/room-archive --dry-run",
            "archive --older-than 90 --to s3://bucket/rooms",
            f"archive --back --room {ROOM}",
        ),
    ),
    CliCommand(
        "train-dictionary",
        train_dictionary.command,
        CLEAN,
        ("train-dictionary --dry-run", "train-dictionary --events 50000"),
    ),
    CliCommand(
        "forget-user",
        forget_user.command,
        CLEAN,
        (
            "forget-user @alice:example.org",
            "forget-user @alice:example.org --undo",
            "forget-user @alice:example.org --remove",
        ),
    ),
    CliCommand(
        "export-user",
        export_user.command,
        CLEAN,
        ("export-user @alice:example.org alice",),
    ),
    CliCommand(
        "purge",
        purge.command,
        CLEAN,
        (
            f"purge {ROOM} --before-date 2026-01-31 --dry-run",
            f"purge {ROOM} --all",
            "purge --retention --quiet",
            "purge --resume",
        ),
    ),
    CliCommand(
        "rebuild-visibility", rebuild_visibility.command, CLEAN, (f"rebuild-visibility {ROOM}",)
    ),
)


def _epilog(examples: Sequence[str]) -> str:
    lines = [one if "room-storage" in one else f"room-storage {one}" for one in examples]
    return "\n\n".join(["Examples:", *(f"  {line}" for line in lines)])


for one in COMMANDS:
    app.command(
        one.name, cls=PlainCommand, rich_help_panel=one.panel, epilog=_epilog(one.examples)
    )(one.function)
app.add_typer(spark.app, name="spark", rich_help_panel=MOVE)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Typer reports usage errors, with exit code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with interruptible():
            app(given, prog_name="room-storage")
    except Interrupted as interrupted:
        ignore_signals()
        _print_end(interrupted.sentence)
        return int(str(interrupted.code))
    except SystemExit as exit_:
        if isinstance(exit_.__context__, BrokenPipeError):  # Typer has made 1 of it: findings
            return CLOSED_PIPE
        return exit_.code if isinstance(exit_.code, int) else ExitCode.DONE
    except StorageError as error:
        _report(error, as_json="--json" in given)
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
