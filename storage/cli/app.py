"""The list of commands, and how an error ends: one sentence on standard error and an exit code.

A traceback is never shown. To add a command, add a module of this package with a function `command`
(typer's options), and a line below.
"""

import logging
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from storage.cli import (
    censor,
    demo,
    explain,
    explain_visibility,
    export_file,
    forget_user,
    gc,
    import_files,
    jobs,
    logs,
    migrate,
    purge,
    rebuild_visibility,
    serve,
    spark,
    stats,
    verify,
)
from storage.cli.common import ExitCode, print_json
from storage.cli.interrupt import Interrupted, ignore_signals, interruptible
from storage.cli.logs import LogFormat, LogLevel
from storage.errors import DatabaseError, StorageCorrupt, StorageError
from storage.version import __version__

logger = logging.getLogger(__name__)

app = typer.Typer(
    name="room-storage",
    help=(
        "The rooms of a Matrix homeserver, on Postgres."
        " Exit codes: 0 done, 1 done with findings, 2 bad usage or input, 3 no database,"
        " 130 interrupted (SIGINT), 143 (SIGTERM)."
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
            help="Log records from this level on; default: info for serve, warning for the others.",
            show_default=False,
        ),
    ] = None,
    log_format: Annotated[
        LogFormat,
        typer.Option(envvar="STORAGE_LOG_FORMAT", help="The lines of the log, on standard error."),
    ] = LogFormat.TEXT,
) -> None:
    """Accept the options that stand before a command."""
    default = LogLevel.INFO if context.invoked_subcommand == "serve" else LogLevel.WARNING
    logs.begin(log_level or default, log_format)


app.command("demo")(demo.command)
app.command("migrate")(migrate.command)
app.command("jobs")(jobs.command)
app.command("import")(import_files.command)
app.command("export")(export_file.command)
app.command("stats")(stats.command)
app.command("serve")(serve.command)
app.command("verify")(verify.command)
app.command("rebuild-visibility")(rebuild_visibility.command)
app.command("explain")(explain.command)
app.command("explain-visibility")(explain_visibility.command)
app.command("gc")(gc.command)
app.command("censor")(censor.command)
app.command("forget-user")(forget_user.command)
app.command("purge")(purge.command)
app.add_typer(spark.app, name="spark")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code. Typer reports usage errors, with exit code 2."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with interruptible():
            app(given, prog_name="room-storage")
    except Interrupted as interrupted:
        ignore_signals()
        typer.echo(interrupted.sentence, err=True)
        return int(str(interrupted.code))
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else ExitCode.DONE
    except StorageError as error:
        _report(error, as_json="--json" in given)
        return _exit_code(error)
    finally:
        logs.end()
    return ExitCode.DONE


def _exit_code(error: StorageError) -> ExitCode:
    if isinstance(error, DatabaseError):
        return ExitCode.UNAVAILABLE
    return ExitCode.FINDINGS if isinstance(error, StorageCorrupt) else ExitCode.USAGE


def _report(error: StorageError, *, as_json: bool) -> None:
    """Report an error: for people on standard error, for programs on standard output.

    Where the log is JSON, standard error has nothing else.
    """
    if as_json:
        print_json({"error": type(error).__name__, "message": str(error)})
    elif logs.is_json():
        logger.error("%s", error, extra={"error": type(error).__name__})
    else:
        typer.echo(f"error: {error}", err=True)
