"""Every code block of the README and of the documentation runs, or is marked as output.

`tests/docs/page.py` says how each language is run, and what a block finds.
"""

import configparser
from pathlib import Path
from typing import Final

import asyncpg
import pytest
import yaml

import storage
from tests.docs.markdown import CodeBlock, blocks, indented_code, name_of, pages
from tests.docs.page import LANGUAGES, PageRun, begins_empty, commands_of
from tests.docs.rooms import ROOM, build, middle_event, write_file
from tests.long_run import long_run

PAGES = pages()
FURNISHED = next(page for page in PAGES if not begins_empty(page))

NOT_RUN: Final[dict[str, int]] = {
    "README.md": 1,
    "docs/how-to/backup-and-restore.md": 2,
    "docs/how-to/connect.md": 1,
    "docs/how-to/damaged-indexes.md": 1,
    "docs/how-to/forget-a-user.md": 1,
    "docs/how-to/mirror.md": 1,
    "docs/how-to/pgbouncer.md": 1,
    "docs/how-to/serve.md": 2,
    "docs/how-to/spark.md": 1,
    "docs/how-to/submit-to-a-cluster.md": 2,
    "docs/how-to/write-a-page.md": 1,
    "docs/tutorial/index.md": 1,
}
"""Blocks that cannot be run, by page. Each has its reason in the page."""

NOT_RUN_MAX: Final = 15

CHECKED: Final = {
    page: text
    for page in PAGES
    if (text := page.read_text("utf-8")) and any(b.is_run for b in blocks(text))
}


ON_SPARK = ("analyse-a-mirror", "import-from-synapse", "mirror", "spark")
"""Pages whose commands take a minute."""


@pytest.mark.timeout(600)  # a job on Spark takes ten seconds, and a minute on a busy machine
@pytest.mark.xdist_group("docs")
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=long_run if page.stem in ON_SPARK else ()) for page in CHECKED],
    ids=map(name_of, CHECKED),
)
def test_the_blocks_of_a_page_run(
    page: Path, page_dsn: str, tmp_path: Path, programs: Path
) -> None:
    write_file(tmp_path)
    with PageRun(page_dsn, tmp_path, middle_event(build(ROOM, seed=1)), programs) as run:
        for block in blocks(CHECKED[page]):
            if block.is_run:
                failing_at(run, page, block)


def failing_at(run: PageRun, page: Path, block: CodeBlock) -> None:
    try:
        run.run(block)
    except BaseException as error:
        error.add_note(f"{name_of(page)}:{block.line}: the {block.language} block")
        raise


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_each_block_has_a_language(page: Path) -> None:
    text = page.read_text("utf-8")
    assert [b.line for b in blocks(text) if b.language not in LANGUAGES] == []
    assert indented_code(text) == []


def test_few_blocks_are_not_run() -> None:
    found = {
        name_of(page): [b for b in blocks(page.read_text("utf-8")) if not b.is_run]
        for page in PAGES
    }
    assert {page: len(listed) for page, listed in found.items() if listed} == NOT_RUN
    assert [page for page, listed in found.items() if not all(b.reason for b in listed)] == []
    assert sum(NOT_RUN.values()) <= NOT_RUN_MAX


# --------------------------------------------------------------------------------------------------
# the runner itself


def block_of(info: str, code: str = "") -> CodeBlock:
    [block] = blocks(f"```{info}\n{code}```\n")
    return block


def test_a_block_is_read() -> None:
    assert block_of("sql", "SELECT 1\n") == CodeBlock(1, "sql", True, "", "SELECT 1\n", False)
    assert block_of("").language == ""
    assert block_of("python title=x").language == ""
    marked = block_of('{ .bash .norun data-reason="a second machine" }')
    assert (marked.language, marked.is_run, marked.reason) == ("bash", False, "a second machine")
    assert block_of("{ .bash }").is_run
    [inner] = blocks("- one\n\n    ```sql\n    SELECT\n        1\n    ```\n")
    assert inner.code == "SELECT\n    1\n"
    [hidden, seen] = blocks("<!--\n```sql\n```\n-->\n```sql\n```\n")
    assert (hidden.hidden, seen.hidden) == (True, False)
    [unended] = blocks("```sql\nSELECT 1\n")
    assert unended.language == ""


def test_indented_code_is_found() -> None:
    assert indented_code("Text:\n\n    code\n    more\n\nText.\n\n    code\n") == [3, 8]
    assert indented_code("- item\n\n    more of it\n\nText\n    goes on\n") == []
    assert indented_code("!!! note\n\n    text\n\n        code\n") == [5]
    assert indented_code("```text\n\n    shown\n```\n") == []


def test_commands_are_told_from_output() -> None:
    assert commands_of("$ one \\\n> two\nout\n$ three\nout") == "one \\\ntwo\nthree"


WRONG: Final = (
    AssertionError,
    ValueError,
    storage.StorageError,
    asyncpg.PostgresError,
    configparser.Error,
    yaml.YAMLError,
)


@pytest.mark.parametrize("page", [FURNISHED], ids=["any"])
@pytest.mark.parametrize(
    "info,code",
    [
        ("python", "raise ValueError\n"),
        ("python", "await store.sync('no id')\n"),
        ("bash", "false\ntrue\n"),
        ("bash", "echo $unset\n"),
        ("bash", "room-storage no-such-command\n"),
        ("console", "$ false\n"),
        ("sql", "SELECT 1;\nSELECT * FROM no_table;\n"),
        ("ini", "[a\n"),
        ("json", "{'a': 1}\n"),
        ("ndjson", "{}\n}\n"),
        ("toml", "a = \n"),
        ("yaml", "a: b: c\n"),
    ],
)
def test_a_wrong_block_fails(
    page: Path, page_dsn: str, tmp_path: Path, programs: Path, info: str, code: str
) -> None:
    with PageRun(page_dsn, tmp_path, "$id", programs) as run, pytest.raises(WRONG):
        run.run(block_of(info, code))


OPENING = """
import contextlib
opened = contextlib.AsyncExitStack()
await opened.enter_async_context(storage.open(dsn, server_name="example.org"))
opened.callback(closed.append, "closed")
raise ValueError("the page fails")
"""


@pytest.mark.parametrize("page", [FURNISHED], ids=["any"])
def test_a_page_that_fails_closes_its_stores(
    page: Path, page_dsn: str, tmp_path: Path, programs: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise the end of the loop closes their generators, each while another runs."""
    with PageRun(page_dsn, tmp_path, "$id", programs) as run:
        run.run(block_of("python", "import storage\nclosed = []\n"))
        with pytest.raises(ValueError, match="the page fails"):
            run.run(block_of("python", OPENING))
    assert run.names["closed"] == ["closed"]
    assert "asynchronous generator" not in caplog.text


@pytest.mark.parametrize("page", [FURNISHED], ids=["any"])
def test_a_quick_command_is_the_command(
    page: Path, page_dsn: str, tmp_path: Path, programs: Path
) -> None:
    code = """
test "$(which room-storage)" != "$(which python | xargs dirname)/room-storage"
room-storage gc --no-such-option 2> usage || test $? = 2
grep -q no-such-option usage
room-storage export - > all.ndjson
grep -q '"pdu"' all.ndjson
room-storage import - --json < all.ndjson | grep duplicate
room-storage serve --port 0 > served 2>&1 & server=$!
until grep -q listening served; do sleep 0.05; done
kill -TERM $server
wait $server || test $? = 143
"""
    with PageRun(page_dsn, tmp_path, "$id", programs) as run:
        run.run(block_of("bash", code))
        run.run(block_of("bash", "room-storage serve --port 0 > served &\n"))
        run.run(block_of("bash", "until grep -q listening served; do sleep 0.05; done\n"))


GOOD = """
```python
import os
found = await store.event(event_id)
assert found.room_id == room_id
```

```python
import storage
async with storage.open(instance_name="other") as other:
    assert (await other.event("$event")).event_id == found.event_id
```

```python
import asyncio
asyncio.run(asyncio.sleep(0))
```

```bash
export FOUND=1
sleep 1000 &
room-storage import rooms.ndjson
```

```console
$ test "$FOUND" = 1
lines of output
$ psql -Atc 'SELECT count(*) FROM rooms' postgresql://user@host/rooms > rooms
```

```sql
CREATE TABLE t (n int); -- a comment
INSERT INTO t SELECT 1 WHERE '$event' = '';
```

```ini
[Unit]
After=network.target
After=postgresql.service
```

```ini
password = a%b
```
"""


@pytest.mark.parametrize("page", [FURNISHED], ids=["any"])
def test_good_blocks_run_in_order(
    page: Path, page_dsn: str, tmp_path: Path, programs: Path
) -> None:
    write_file(tmp_path)
    with PageRun(page_dsn, tmp_path, middle_event(build(ROOM, seed=1)), programs) as run:
        for block in blocks(GOOD):
            run.run(block)
    assert (tmp_path / "rooms").read_text() == "2\n"


def test_a_page_says_that_its_database_is_empty(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Text.")
    assert not begins_empty(page)
    page.write_text("<!-- database: empty -->\nText.")
    assert begins_empty(page)
