"""Run the code blocks of one page in order, as a reader would.

How a block runs follows from its language:

* `python` is executed; `await` works at the top level. Blocks of a page share their names.
  `storage.open()` without a DSN opens the page's database. A block that uses `store` without
  having opened one gets an open store, and one that uses `spark` a session. `room_id`, `event_id`
  and `user_id` are of that database.
* `bash` is run by bash with `-euo pipefail`, in the page's folder. `room-storage` and the programs
  of Postgres are on the path, and `STORAGE_DSN` is set. Exported variables last until the page
  ends. In `console`, lines after `$ ` are run, and the others are output.
* `sql` is run in the page's database.
* `ini`, `json`, `ndjson`, `toml` and `yaml` are parsed.
* `text` is output and `mermaid` a picture: they are not run.

The database has the room `!room:example.org` of `@alice:example.org`, `@bob:example.org` and
`@carol:matrix.test`; `$event` in quotes becomes the id of one of its messages. The folder has
`rooms.ndjson`, another room to import. The README, the tutorial, and a page with the comment
`<!-- database: empty -->` begin without rooms. Any `postgresql://…` in a block becomes the DSN of
the page's database, except one without a host, as `postgresql:///other`: variables as `PGHOST`
choose the server of the page for it, as for the programs of Postgres.

A block in an HTML comment is run, and not shown. A block that cannot be run says so, with a reason:

    ```{ .bash .norun data-reason="needs a second machine" }
"""

import ast
import asyncio
import configparser
import inspect
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Final, Self
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
import yaml

import storage
from tests.docs.markdown import CodeBlock
from tests.docs.rooms import ALICE, ROOM, SERVER
from tests.postgres import client_programs

DSN: Final = re.compile(r"postgres(?:ql)?://(?!/)[^\s'\"<>`,)]*")
SHELL_DSN: Final = re.compile(rf"(['\"]?){DSN.pattern}\1")
EVENT: Final = re.compile(r"(?<=['\"])\$event(?=['\"])")
SECONDS: Final = 400
"""For one block: a job on Spark takes ten seconds, and minutes on a busy machine."""

JAVA_OPTIONS: Final = "-XX:+UnlockDiagnosticVMOptions -XX:-BytecodeVerificationRemote"
"""Verification is a fifth of the start of Spark (tests/pipeline/java.py)."""

WRAPPED: Final = """
set -a; [ ! -f .exported ] || . ./.exported; set +a
trap 'declare -px > .exported' EXIT
export STORAGE_DSN={dsn}
set -euo pipefail
{code}
"""


class PageRun:
    """One page: its database, its folder, and the names that its blocks have defined."""

    def __init__(self, dsn: str, folder: Path, event_id: str, programs: Path) -> None:
        self.dsn = dsn
        self.folder = folder
        self.path = [programs, Path(sys.executable).parent, client_programs()]
        self.event_id = event_id
        self.names: dict[str, Any] = {
            "__name__": "__main__",
            "dsn": dsn,
            "event_id": event_id,
            "room_id": ROOM,
            "user_id": ALICE,
        }
        self._runner = asyncio.Runner()
        self._opened = AsyncExitStack()
        self._sessions: list[int] = []
        self._patches = pytest.MonkeyPatch()

    def __enter__(self) -> Self:
        """Make the page's database that of `storage.open()`, and its folder the present one."""
        opened = storage.open
        self._patches.setattr(storage, "open", lambda dsn=self.dsn, **how: opened(dsn, **how))
        self._patches.setenv("STORAGE_DSN", self.dsn)
        self._patches.chdir(self.folder)
        return self

    def __exit__(self, *_: object) -> None:
        """Close the stores, and end the programs that the page left running.

        A page that fails does not reach its own `aclose`. The end of the event loop would close the
        generators of the store all at once, each while another runs.
        """
        for stack in [one for one in self.names.values() if isinstance(one, AsyncExitStack)]:
            self._runner.run(stack.aclose())
        self._runner.run(self._opened.aclose())
        self._runner.close()
        self._patches.undo()
        for session in self._sessions:
            try:
                os.killpg(session, signal.SIGTERM)
            except ProcessLookupError:
                continue

    def run(self, block: CodeBlock) -> None:
        """Run a block. Raise if it fails."""
        is_shell = block.language in {"bash", "console"}
        pattern, dsn = (SHELL_DSN, shlex.quote(self.dsn)) if is_shell else (DSN, self.dsn)
        code = pattern.sub(lambda _: dsn, EVENT.sub(lambda _: self.event_id, block.code))
        LANGUAGES[block.language](self, code)

    def run_python(self, code: str) -> None:
        tree = ast.parse(code)
        wanted = free_names(tree) - set(self.names)
        if "store" in wanted:
            opening = storage.open(self.dsn, server_name=SERVER, instance_name="page")
            self.names["store"] = self._runner.run(self._opened.enter_async_context(opening))
        if "spark" in wanted:
            self.names["spark"] = self._opened.enter_context(spark_session(self.folder))
        compiled = compile(tree, "<page>", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        if compiled.co_flags & inspect.CO_COROUTINE:
            self._runner.run(self._awaited(compiled))
        else:
            exec(compiled, self.names)

    async def _awaited(self, compiled: Any) -> None:
        await eval(compiled, self.names)

    def run_bash(self, code: str) -> None:
        script = WRAPPED.format(dsn=f"'{self.dsn}'", code=code)
        with (self.folder / ".output").open("w+b") as output:
            process = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._sessions.append(process.pid)
            try:
                status = process.wait(SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                status = process.wait()
            output.seek(0)
            printed = output.read().decode(errors="replace")
        assert status == 0, f"exit code {status}:\n{code}\n{printed[-3000:]}"

    def _environment(self) -> dict[str, str]:
        parts = urlsplit(self.dsn)
        query = parse_qs(parts.query)
        given = {
            "PGHOST": parts.hostname or query.get("host", [""])[0],
            "PGPORT": str(parts.port or query.get("port", [""])[0]),
            "PGUSER": parts.username or query.get("user", [""])[0],
            "PGPASSWORD": parts.password or "",
            "PGDATABASE": parts.path.lstrip("/"),
        }
        kept = {name: os.environ[name] for name in ("LANG", "TZ") if name in os.environ}
        return (
            kept
            | {name: value for name, value in given.items() if value}
            | {
                "HOME": str(self.folder),
                "JDK_JAVA_OPTIONS": JAVA_OPTIONS,
                "PATH": ":".join([*map(str, self.path), os.environ["PATH"]]),
                "STORAGE_DATA_DIR": str(self.folder / "data"),
                "STORAGE_EMBEDDED_SHARED_BUFFERS_MB": "16",
            }
        )

    def run_console(self, code: str) -> None:
        self.run_bash(commands_of(code))

    def run_sql(self, code: str) -> None:
        asyncio.run(self._executed(code))

    async def _executed(self, code: str) -> None:
        connection = await asyncpg.connect(self.dsn)
        try:
            for statement in statements_of(code):
                await connection.execute(statement)
        finally:
            await connection.close()

    def parse_ini(self, code: str) -> None:
        parser = configparser.ConfigParser(allow_no_value=True, strict=False, interpolation=None)
        parser.read_string(code if code.lstrip().startswith("[") else f"[top]\n{code}")

    def parse_json(self, code: str) -> None:
        json.loads(code)

    def parse_ndjson(self, code: str) -> None:
        for line in code.splitlines():
            json.loads(line)

    def parse_toml(self, code: str) -> None:
        tomllib.loads(code)

    def parse_yaml(self, code: str) -> None:
        list(yaml.safe_load_all(code))

    def show(self, code: str) -> None:
        """Do nothing: the block is output, or a picture."""


LANGUAGES: Final[Mapping[str, Callable[[PageRun, str], None]]] = {
    "bash": PageRun.run_bash,
    "console": PageRun.run_console,
    "ini": PageRun.parse_ini,
    "json": PageRun.parse_json,
    "mermaid": PageRun.show,
    "ndjson": PageRun.parse_ndjson,
    "python": PageRun.run_python,
    "sql": PageRun.run_sql,
    "text": PageRun.show,
    "toml": PageRun.parse_toml,
    "yaml": PageRun.parse_yaml,
}


def spark_session(folder: Path) -> AbstractContextManager[Any]:
    """Open a small session; skip the test where Java is missing."""
    from storage.pipeline.session import check_java, session  # noqa: PLC0415  # takes a second
    from tests.pipeline.java import QUICK  # noqa: PLC0415  # as above

    try:
        check_java()
    except storage.InputError as error:
        pytest.skip(str(error))
    conf = {
        "spark.driver.extraJavaOptions": QUICK,
        "spark.driver.memory": "600m",
        "spark.local.dir": str(folder / "spark"),
        "spark.sql.shuffle.partitions": "1",
    }
    return session("local[1]", conf, name="docs")


def begins_empty(page: Path) -> bool:
    """Return whether a page begins with an empty database."""
    return (
        page.name == "README.md"
        or "tutorial" in page.parts
        or "<!-- database: empty -->" in page.read_text("utf-8")
    )


def commands_of(console: str) -> str:
    """Return the lines after `$ `, and those that continue them after a backslash."""
    found: list[str] = []
    for line in console.splitlines():
        if line.startswith("$ "):
            found.append(line[2:])
        elif found and found[-1].endswith("\\"):
            found.append(line.removeprefix("> "))
    return "\n".join(found)


def statements_of(sql: str) -> list[str]:
    """Return the statements of a block, which end with their lines."""
    parts = [sql] if "$$" in sql else re.split(r";[^\S\n]*(?:--.*)?\n", sql)
    return [part for part in parts if re.sub(r"--.*", "", part).strip()]


def free_names(tree: ast.Module) -> set[str]:
    """Return the names that a block reads and does not bind."""
    names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
    arguments = {node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)}
    bound = {node.id for node in names if isinstance(node.ctx, ast.Store)} | arguments
    return {node.id for node in names if isinstance(node.ctx, ast.Load)} - bound
