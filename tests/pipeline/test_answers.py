"""Responses of /backfill in files give the same store as appending their events one by one.

The report of a malformed one has its file and number.
"""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from storage.errors import InputError
from storage.pipeline import import_archive
from storage.pipeline.imports import lines as archive_lines
from storage.pipeline.imports.lines import LineContent, answered, found, placed, read, together
from storage.testing import SHAPES, GeneratedEvent, GeneratedRoom, generate_room
from tests.pipeline.stores import SERVER, fill, tables
from tests.pipeline.test_import import append_patiently

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


def answer(pdus: Iterable[bytes], separator: bytes = b",") -> bytes:
    return (
        b'{"origin": "s2.test", "origin_server_ts": 1700000000000, "pdus": ['
        + separator.join(pdus)
        + b"]}"
    )


def as_history(events: Iterable[GeneratedEvent]) -> list[GeneratedEvent]:
    return [replace(event, origin="backfill") for event in events]


def part_of(room: GeneratedRoom, count: int) -> GeneratedRoom:
    return replace(room, events=room.events[:count])


def test_small_files_are_read_together(tmp_path: Path) -> None:
    for number in range(1_500):
        (tmp_path / f"{number:04}.json").write_bytes(answer([b"{}"] * (1 + number % 3)))
    (tmp_path / "large.ndjson").write_bytes(b"{}\n" * 1_000_000)
    stretches = found([str(tmp_path)]).ranges(2)
    tasks = together(stretches)
    assert [one for task in tasks for one in task] == stretches
    assert [len(task) for task in tasks[:2]] == [1_000, 500]
    assert all(len(task) == 1 for task in tasks[2:])
    assert len(tasks) == 5
    assert together([]) == []


async def test_the_tables_are_those_of_appending_as_history(
    spark: SparkSession, dsn: str, another_dsn: str, tmp_path: Path
) -> None:
    """The store has the beginning of one room.

    The other room comes whole, newest first, with its create event in the last response.
    """
    known = generate_room(SHAPES["small_chat"], 50, seed=6, sign=False)
    new = generate_room(SHAPES["fork_heavy"], 40, seed=7, version="6", sign=False)
    for target in (dsn, another_dsn):
        await fill(target, part_of(known, 20))
    newest_first = list(new)[::-1]
    lines = [answer(event.pdu for event in newest_first[at : at + 10]) for at in range(0, 40, 10)]
    lines[2:2] = [b'{"errcode": "M_FORBIDDEN"}', b"", b'{"pdus": [{"type": "m.x"}, 7]}']
    (tmp_path / "answers.ndjson").write_bytes(b"\n".join(lines))
    (tmp_path / "pretty.json").write_bytes(
        answer((event.pdu for event in list(known)[20:]), b",\n  ")
    )
    (tmp_path / "torn.json").write_bytes(b'{\n"pdus": [\n{},\n')
    paths = [str(tmp_path / name) for name in ("answers.ndjson", "pretty.json", "torn.json")]
    summary = import_archive(spark, paths, dsn, server_name=SERVER, rejects=str(tmp_path / "dead"))
    await append_patiently(another_dsn, as_history([*newest_first, *list(known)[20:]]))
    assert await tables(dsn) == await tables(another_dsn)
    assert summary.rejects == 4
    letters = spark.read.parquet(str(tmp_path / "dead")).orderBy("source", "line", "part").collect()
    assert [(row.source, row.line, row.part, row.outcome) for row in letters] == [
        (paths[0], 3, None, "bad_line"),
        (paths[0], 5, 1, "invalid"),
        (paths[0], 5, 2, "invalid"),
        (paths[2], 1, None, "bad_line"),
    ]
    again = import_archive(spark, paths[:2], dsn, server_name=SERVER)
    assert again.outcomes["duplicate"] == 70


@pytest.mark.parametrize(
    "name,content,told",
    [
        (
            "one.json",
            answer([b'{"a":1}', b' {"b" : 2}']),
            [(1, 1, b'{"a":1}'), (1, 2, b'{"b" : 2}')],
        ),
        ("pretty.json", b'{\n "pdus": [\n  {"a":1}\n ]\n}\n', [(1, 1, b'{"a":1}')]),
        ("empty.json", b"", [(1, 0, None)]),
        ("none.json", answer([]), []),
        ("torn.json", b'{\n "pdus": [\n  {"a":1},\n', [(1, 0, None)]),
        (
            "lines.txt",
            answer([b"{}"]) + b"\n\n" + answer([b"[]"]) + b"\nnonsense\n",
            [(1, 1, b"{}"), (3, 1, b"[]"), (4, 0, None)],
        ),
        ("begins_badly.json", b"nonsense\n" + answer([b"{}"]), [(1, 0, None), (2, 1, b"{}")]),
    ],
)
def test_a_file_has_one_answer_or_one_on_each_line(
    name: str, content: bytes, told: list[tuple[int, int, bytes | None]], tmp_path: Path
) -> None:
    (tmp_path / name).write_bytes(content)
    [stretch] = found([str(tmp_path / name)]).ranges(2)
    assert stretch.kind == "answer"
    rows = list(read(stretch))
    assert [
        (
            *answered(placed(row.place)[1]),
            row.content.pdu if isinstance(row.content, LineContent) else None,
        )
        for row in rows
    ] == told
    assert {row.content.origin for row in rows if isinstance(row.content, LineContent)} <= {
        "backfill"
    }


def test_lines_of_pdus_are_not_taken_for_answers(tmp_path: Path) -> None:
    for content in (
        b'{"pdu": {"pdus": []}}',
        b'{"type": "x", "content": {"pdus": [1]}}',
        b'{"sender": "@a:b", "pdus": []}',
    ):
        (tmp_path / "rooms.ndjson").write_bytes(content)
        assert [one.kind for one in found([str(tmp_path / "rooms.ndjson")]).ranges(1)] == ["lines"]


def test_more_answers_than_can_be_numbered_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "many.json").write_bytes(b"\n".join([answer([b"{}"])] * 4))
    monkeypatch.setattr(archive_lines, "FILE_SHIFT", archive_lines.ANSWER_SHIFT + 2)
    [stretch] = found([str(tmp_path / "many.json")]).ranges(1)
    with pytest.raises(InputError, match="split it"):
        list(read(stretch))
