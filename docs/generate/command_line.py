"""`reference/cli.md`: each command of `room-storage`, with its arguments, options and defaults."""

import signal
from collections.abc import Iterator
from typing import Any, Final

import typer
from typer.core import TyperGroup

from docs.generate.markup import code, one_line, page, table
from storage.cli.app import app
from storage.cli.output import ExitCode

INTRODUCTION: Final = """
# Command line

`python -m storage` is the same program. `--dsn` selects the database, else the variable in its
row. Without either, the embedded Postgres is used. `--json` prints output for programs. An error is
one sentence on standard error; with `--json` it is an object on standard output. Each command has
`--help`.
"""

EXIT_CODES: Final = {
    ExitCode.DONE: "Done.",
    ExitCode.FINDINGS: "Done, with findings: lines that were not stored, or a broken invariant.",
    ExitCode.USAGE: "Bad usage or input, a role without the privilege, or a name that is taken. "
    "Nothing was done.",
    ExitCode.UNAVAILABLE: "Postgres could not be reached, or refused.",
    128 + signal.SIGINT: "Interrupted (SIGINT).",
    128 + signal.SIGPIPE: "The reader of standard output has closed it, as `head` does.",
    128 + signal.SIGTERM: "Ended (SIGTERM).",
}


def text() -> str:
    """Return the page."""
    root: Any = typer.main.get_command(app)
    codes = table(["Code", "Meaning"], [[str(int(n)), said] for n, said in EXIT_CODES.items()])
    options = _options(root)
    return page(
        INTRODUCTION,
        table(["Command", "Purpose"], _overview("", root)),
        f"## Exit codes\n\n{codes}",
        f"## Options before a command\n\n{options}" if options else "",
        *_sections("room-storage", root, level=2),
    )


def _overview(prefix: str, group: Any) -> Iterator[list[str]]:
    for name, command in group.commands.items():
        full = f"{prefix} {name}".strip()
        if isinstance(command, TyperGroup):
            yield from _overview(full, command)
        elif not command.hidden:
            yield [f"[`{full}`](#room-storage-{full.replace(' ', '-')})", _summary(command)]


def _summary(command: Any) -> str:
    first = one_line((command.help or "").split("\n\n")[0])
    return first.split(". ")[0].rstrip(".") + "."


def _sections(prefix: str, group: Any, *, level: int) -> Iterator[str]:
    for name, command in group.commands.items():
        if command.hidden:
            continue
        full = f"{prefix} {name}"
        yield f"{'#' * level} {full}"
        yield "\n\n".join(map(one_line, (command.help or "").split("\n\n")))
        if isinstance(command, TyperGroup):
            yield from _sections(full, command, level=level + 1)
            continue
        yield f"```text\n{' '.join([full, *_usage(command)])}\n```"
        yield _arguments(command)
        yield _options(command)


def _usage(command: Any) -> Iterator[str]:
    for param in command.params:
        if param.param_type_name == "argument":
            shown = _argument_name(param) + ("..." if param.nargs < 0 else "")
            yield shown if param.required else f"[{shown}]"
    yield "[OPTIONS]"


def _argument_name(param: Any) -> str:
    return str(param.metavar or param.name).upper().strip("[].")


def _arguments(command: Any) -> str:
    found = [param for param in command.params if param.param_type_name == "argument"]
    rows = [[code(_argument_name(param)), one_line(param.help or "")] for param in found]
    return table(["Argument", "Meaning"], rows)


def _options(command: Any) -> str:
    rows = [
        [_names(param), _default(param), code(param.envvar or ""), one_line(param.help or "")]
        for param in command.params
        if param.param_type_name == "option" and not param.hidden
    ]
    return table(["Option", "Default", "Variable", "Meaning"], rows)


def _names(param: Any) -> str:
    value = "" if param.is_flag else f" {param.metavar or _kind(param)}"
    return ", ".join(code(name + value) for name in (*param.opts, *param.secondary_opts))


def _kind(param: Any) -> str:
    kind = param.type_descriptor.annotation
    if param.min is not None and param.max is not None:
        return f"{param.min}..{param.max}"
    return "NUMBER" if kind in {int, float} else "TEXT"


def _default(param: Any) -> str:
    """Return the default; the meaning of an option says it where there is none here."""
    if param.is_flag or param.default in (None, ()) or param.show_default is False:
        return ""
    return code(param.show_default if isinstance(param.show_default, str) else param.default)
