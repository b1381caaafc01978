"""The reference that is made from the code has all of it, and what it says is so."""

import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Final, NamedTuple

import griffe
import pytest
import typer
import yaml
from prometheus_client import CollectorRegistry
from typer.core import TyperGroup

import storage
from benchmarks.figures import figures as figures_of
from benchmarks.figures import read as read_results
from docs.generate import api, errors, metrics, settings, statements
from docs.generate.all_pages import generated_pages
from docs.generate.schema_file import SCHEMA, SchemaColumn, read
from docs.generate.store_calls import StoreCalls
from storage.cli.app import app
from storage.config import Config
from storage.database import Connection
from storage.observability.prometheus import expose
from storage.replication.commands import COMMANDS, parse
from tests.docs.markdown import ROOT, blocks, paragraphs
from tests.long_run import long_run
from tests.source.test_words import OF_THE_HOUSE, faults

GENERATED: Final = generated_pages()

SQL_COLUMNS: Final = """
SELECT c.relname, a.attname, NOT a.attnotnull AS is_nullable, format_type(a.atttypid, NULL) AS type,
    col_description(c.oid, a.attnum) AS comment
FROM pg_attribute a
JOIN pg_class c ON c.oid = a.attrelid
WHERE c.relnamespace = 'public'::regnamespace AND c.relkind = 'r' AND a.attnum > 0
    AND c.relname <> 'alembic_version'
ORDER BY c.relname, a.attnum
"""
SQL_INDEXES: Final = """
SELECT t.relname AS table_name, i.relname, COALESCE(obj_description(i.oid, 'pg_class'),
    obj_description(k.oid, 'pg_constraint')) AS comment
FROM pg_index x
JOIN pg_class i ON i.oid = x.indexrelid
JOIN pg_class t ON t.oid = x.indrelid
LEFT JOIN pg_constraint k ON k.conindid = i.oid AND k.contype IN ('p', 'u', 'x')
WHERE t.relnamespace = 'public'::regnamespace AND t.relname <> 'alembic_version'
"""


class CatalogueColumn(NamedTuple):
    relname: str
    attname: str
    is_nullable: bool
    type: str
    comment: str | None


class CatalogueIndex(NamedTuple):
    table_name: str
    relname: str
    comment: str | None


@pytest.mark.parametrize("name", GENERATED)
def test_a_generated_page_is_written_plainly(name: str) -> None:
    said = list(paragraphs(GENERATED[name]))
    assert [(line, fault) for line, prose in said for fault in faults(prose)] == []
    assert [(line, word) for line, prose in said for word in OF_THE_HOUSE.findall(prose)] == []


# --------------------------------------------------------------------------------------------------
# API


def test_each_public_name_is_on_one_page() -> None:
    listed = [
        name
        for text in GENERATED.values()
        for name in re.findall(r"^::: storage\.([\w.]+)$", text, re.MULTILINE)
    ]
    assert [name for name in set(listed) if listed.count(name) > 1] == []
    packages = {"auth", "event", "federation", "replication", "responses", "streams", "visibility"}
    assert set(storage.__all__) - packages - set(listed) == set()
    calls = {name for name in vars(storage.Store) if not name.startswith("_")}
    assert {f"Store.{name}" for name in calls} - set(listed) == set()
    for package in packages:
        parts = [name for name in listed if name.startswith(f"{package}.")]
        assert parts, package


def test_pages_of_the_api_are_in_the_navigation() -> None:
    order = yaml.safe_load((ROOT / "docs/reference/api/.nav.yml").read_text())["nav"]
    assert sorted(order) == sorted(f"{name}.md" for name in api.pages())


@pytest.fixture(scope="module")
def package() -> griffe.Object:
    extensions = griffe.load_extensions(StoreCalls)
    return griffe.load("storage", search_paths=[ROOT], extensions=extensions)  # type: ignore[return-value]


def test_calls_of_the_store_are_methods(package: griffe.Object) -> None:
    for name in api.calls():
        shown: Any = package[f"store.facade.Store.{name}"]
        assert isinstance(shown, griffe.Function), name
        assert shown.docstring, name
        assert shown.returns is not None, name
        assert "store" not in [parameter.name for parameter in shown.parameters], name
    append: Any = package["store.facade.Store.append"]
    assert "async" in append.labels
    assert [parameter.name for parameter in append.parameters][:2] == ["pdus", "room_version"]


def test_rows_have_constructors_and_errors_are_linked(package: griffe.Object) -> None:
    result: Any = package["persist.model.results.AppendResult.__init__"]
    shown = [parameter.name for parameter in result.parameters]
    assert shown == ["self", *storage.AppendResult._fields]
    said: Any = package["store.facade.Store.state_ids"]
    linked = "Raises [`UnknownEvent`][storage.UnknownEvent], [`StateUnknown`][storage.StateUnknown]"
    assert linked in said.docstring.value


# --------------------------------------------------------------------------------------------------
# command line, configuration, errors, metrics


def commands(prefix: str, group: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        full = f"{prefix} {name}"
        found |= commands(full, command) if isinstance(command, TyperGroup) else {full: command}
    return found


def test_each_command_is_described_with_its_options() -> None:
    parts = re.split(r"^#+ (room-storage .*)$", GENERATED["reference/cli.md"], flags=re.MULTILINE)
    described = dict(zip(parts[1::2], parts[2::2], strict=True))
    found = commands("room-storage", typer.main.get_command(app))
    assert len(found) > 15
    for name, command in found.items():
        for param in command.params:
            if not getattr(param, "hidden", False) and param.param_type_name == "option":
                assert all(f"`{one}" in described[name] for one in param.opts), (name, param.opts)
                assert (param.help or "")[:20] in described[name], (name, param.opts)


def test_each_field_is_described() -> None:
    text = GENERATED["reference/config.md"]
    described = {one.name: one for one in settings.settings()}
    assert list(described) == [field.name for field in fields(Config)]
    assert [one.name for one in described.values() if len(one.meaning) < 10] == []
    assert "`STORAGE_POOL_SIZE_MAX`: a whole number from 1 to 10,000; default `10`" in text
    assert "`STORAGE_EMBEDDED_FSYNC`: true or false; default `true`" in text


def test_each_variable_is_described() -> None:
    there = settings.read_variables()
    assert there >= {"STORAGE_DSN", "STORAGE_DATA_DIR"}
    assert there - set(settings.OTHERS) == set()
    assert "| `STORAGE_DSN` | The database" in GENERATED["reference/config.md"]


def test_each_error_is_described() -> None:
    public = {
        name
        for name in storage.__all__
        if isinstance(found := getattr(storage, name), type)
        and issubclass(found, storage.StorageError)
    }
    text = errors.text()
    assert set(re.findall(r"^::: storage\.(\w+)$", text, re.MULTILINE)) == public
    assert "- [`InvalidToken`][storage.InvalidToken] (2): The token cannot be used" in text
    assert "- [`DatabaseFull`][storage.DatabaseFull] (3): Out of disk" in text
    assert "- [`StorageCorrupt`][storage.StorageCorrupt] (1): An invariant is broken" in text


async def test_the_metrics_are_those_of_a_store(dsn: str) -> None:
    described = {one.name.removesuffix("_total"): one for one in metrics.metrics()}
    registry = CollectorRegistry()
    async with storage.open(dsn, server_name="example.org") as store:
        expose(store, registry)
        exposed = {family.name: family for family in registry.collect()}
    assert set(described) == set(exposed)
    for name, family in exposed.items():
        labels = tuple(getattr(family, "_labelnames", ()))
        shown = described[name]
        assert (shown.kind, shown.labels, shown.meaning) == (
            family.type,
            labels,
            family.documentation,
        )


# --------------------------------------------------------------------------------------------------
# schema


def shown_type(column: SchemaColumn) -> str:
    return column.type.partition("(")[0]


async def test_the_tables_are_those_of_a_database(conn: Connection) -> None:
    schema = read(SCHEMA.read_text("utf-8"))
    shown = [
        (table.name, column.name, column.is_nullable, shown_type(column))
        for table in sorted(schema.tables, key=lambda table: table.name)
        for column in table.columns
    ]
    rows = await conn.fetch(SQL_COLUMNS, row=CatalogueColumn)
    there = [(*row[:3], row.type.replace("integer", "int")) for row in rows]
    assert shown == there
    comments = {f"{row.relname}.{row.attname}": row.comment for row in rows if row.comment}
    assert comments == {
        name: said for (kind, name), said in schema.comments.items() if kind == "column"
    }


async def test_the_indexes_are_those_of_a_database(conn: Connection) -> None:
    schema = read(SCHEMA.read_text("utf-8"))
    shown = {
        (table.name, index.name): schema.comments.get(("index", index.name))
        or schema.comments.get(("constraint", index.name))
        for table in schema.tables
        for index in table.indexes
    }
    rows = await conn.fetch(SQL_INDEXES, row=CatalogueIndex)
    assert shown == {(row.table_name, row.relname): row.comment for row in rows}
    assert len(shown) > 50


# --------------------------------------------------------------------------------------------------
# statements


def test_the_files_of_statements_are_those_of_the_code() -> None:
    """`python -m docs.generate.statements` writes them."""
    there = {path.name: path.read_text("utf-8") for path in statements.FOLDER.iterdir()}
    wanted = statements.files()
    assert len(wanted) > 100
    assert there.keys() == wanted.keys()
    assert [name for name in wanted if there[name] != wanted[name]] == []


def test_a_file_names_the_functions_and_the_parameters() -> None:
    write = statements.files()["persist.write.all_tables.write.sql"].replace("\n-- ", " ")
    assert write.startswith("-- Sent by storage.persist.write.all_tables.bound")
    assert "$2 to $5 placed (event_nid, room_nid, backfilled, event_id), " in write
    assert [one.name for one in statements.statements() if not one.senders] == []


# --------------------------------------------------------------------------------------------------
# written by hand


def test_the_lines_of_the_replication_page_can_be_read() -> None:
    page = (ROOT / "docs/reference/replication.md").read_text("utf-8")
    [block] = [one for one in blocks(page) if one.language == "text"]
    lines = block.code.splitlines()
    assert [str(parse(line)) for line in lines] == lines
    assert {line.split()[0] for line in lines} == {kind.NAME for kind in COMMANDS}
    table = re.findall(r"^\| `([A-Z_]+)", page, re.MULTILINE)
    assert set(table) == {kind.NAME for kind in COMMANDS}


# --------------------------------------------------------------------------------------------------
# the site


@pytest.mark.slow
@long_run
def test_the_site_is_built_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = list(tmp_path.rglob("*.html"))
    loaded = re.compile(
        r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//[^\"> ]*"
    )
    assert len(pages) > 30
    assert [found for page in pages for found in loaded.findall(page.read_text("utf-8"))] == []
    writing = (tmp_path / "reference/api/writing.html").read_text("utf-8")
    assert 'id="storage.Store.append"' in writing


def test_the_figures_of_each_full_run_have_a_page() -> None:
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    full = [path for path in files if not read_results(path)["quick"]]
    assert len(full) > 10
    for path in full:
        text = GENERATED[f"benchmarks/results/{path.stem}.md"]
        assert text.count("\n| ") >= len(figures_of(read_results(path)))
        assert f"[{path.stem}]({path.stem}.md)" in GENERATED["benchmarks/results/index.md"]
