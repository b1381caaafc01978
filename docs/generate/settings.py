"""`reference/config.md`: each field of `Config`, with its variable, range and default."""

import ast
import inspect
import re
from collections.abc import Iterator
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple

from docs.generate.markup import code, one_line, page, table
from storage import config
from storage.cache_sizes import SHARES, CacheSizes
from storage.config import ALLOWED, COMMITS, NAME_MAX, Config

INTRODUCTION: Final = """
# Configuration

Pass a `Config` to `storage.open`, or set a variable for each field that you change, for instance
`STORAGE_POOL_SIZE_MAX=20`. `storage.open()` without a `Config` and every command read the
variables. A value of another type or out of its range raises `InputError`, which names the field
and the range. Units stand last in a name: `_ms`, `_bytes`, `_mb`. A field without a unit is a
count.
"""

OTHERS: Final = {
    "STORAGE_DSN": "The database, if `--dsn` is not given. Without both: the embedded Postgres.",
    "STORAGE_DSN_FILE": "A file with the DSN, so that no password is in the environment.",
    "STORAGE_SERVER_NAME": "The homeserver's name, if `--server-name` is not given.",
    "STORAGE_DATA_DIR": "The folder of the embedded Postgres, instead of the user's data folder.",
    "STORAGE_LOG_LEVEL": "The least level of log lines, if `--log-level` is not given.",
    "STORAGE_LOG_FORMAT": "`text` or `json`, if `--log-format` is not given.",
    "STORAGE_REDIS": "The address of Redis, if `--redis` is not given.",
    "STORAGE_ARCHIVE_URL": "The folder of `archive`, if `--to` is not given.",
    "STORAGE_ROLE_PREFIX": "The prefix of the roles that `migrate` creates.",
    "STORAGE_SYNAPSE_DSN": "Synapse's database, for `spark import-synapse`.",
    "STORAGE_SYNAPSE_DSN_FILE": "A file with that DSN.",
}
"""Variables that are no field. The page leaves out one that the package does not read."""


class Setting(NamedTuple):
    """A field, with the comment of its section and its docstring."""

    section: str
    name: str
    meaning: str


def text() -> str:
    """Return the page."""
    listed = list(settings())
    sections = list(dict.fromkeys(one.section for one in listed))
    there = read_variables()
    others = [[code(name), said] for name, said in OTHERS.items() if name in there]
    return page(
        INTRODUCTION,
        *(
            page(f"## {section}", *(_described(one) for one in listed if one.section == section))
            for section in sections
        ),
        _shares(),
        f"## Other variables\n\n{table(['Variable', 'Meaning'], others)}",
    )


def _shares() -> str:
    sizes = asdict(CacheSizes.of(Config().cache_mb))
    rows = [
        [share.contents, f"{share.percent} %", f"{share.entry_bytes:,}", f"{sizes[name]:,}"]
        for name, share in SHARES.items()
    ]
    return page(
        "## Shares of cache_mb",
        "A cache is limited by the number of its entries, which follows from the bytes that one "
        "takes with ordinary ids. The last column is for the default.",
        table(["Entries", "Share", "Bytes of one", "Most"], rows),
    )


def settings() -> Iterator[Setting]:
    """Yield the fields in the order of the source."""
    source = inspect.getsource(config)
    lines = source.splitlines()
    titles = {
        number: line.strip("# ")
        for number, line in enumerate(lines, 1)
        if line.startswith("    # ") and re.fullmatch(r"    # -+", lines[number - 2])
    }
    [body] = [
        node.body
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == Config.__name__
    ]
    for node, following in pairwise(body):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            before = [title for number, title in titles.items() if number < node.lineno]
            section = before[-1] if before else "process"
            yield Setting(section[0].upper() + section[1:], node.target.id, _docstring(following))


def read_variables() -> set[str]:
    """Return the variables that the package names, and that are no field of `Config`."""
    folder = Path(config.__file__).parent
    named = {
        name
        for path in folder.rglob("*.py")
        for name in re.findall(r'"(STORAGE_[A-Z_]+[A-Z])"', path.read_text("utf-8"))
    }
    return named - {f"STORAGE_{field.name.upper()}" for field in fields(Config)}


def _docstring(node: ast.stmt) -> str:
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    return one_line(inspect.cleandoc(str(node.value.value))) if is_text else ""  # type: ignore[attr-defined]


def _described(setting: Setting) -> str:
    kind, allowed = ALLOWED[setting.name]
    default = {field.name: field.default for field in fields(Config)}[setting.name]
    if allowed is not None:
        bounds = f"a whole number from {allowed.least:,} to {allowed.most:,}"
    elif kind is bool:
        bounds = "true or false"
    elif setting.name == "synchronous_commit":
        bounds = ", ".join(map(code, COMMITS))
    else:
        bounds = f"1 to {NAME_MAX} printable ASCII characters"
    shown = str(default).lower() if kind is bool else str(default)
    variable = code(f"STORAGE_{setting.name.upper()}")
    return page(
        f"### {setting.name}",
        f"{variable}: {bounds}; default {code(shown)}",
        setting.meaning,
    )
