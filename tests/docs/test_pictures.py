"""The pictures of the documentation: current, complete, and with the numbers of the engine."""

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from docs.pictures import audience_numbers, chain_cover, positions, purge_phases, schema
from docs.pictures.all_pictures import PICTURES
from docs.pictures.chain_cover import EVENTS
from docs.pictures.state_group_levels import groups
from storage.graph import chains
from storage.visibility import multirange

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "pictures"
SCHEMA = (ROOT / "storage/database/schema.sql").read_text("utf-8")


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_current(name: str) -> None:
    assert (FOLDER / f"{name}.svg").read_text("utf-8") == PICTURES[name]().svg()


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_shown_on_a_page(name: str) -> None:
    pages = [page.read_text("utf-8") for page in (ROOT / "docs").rglob("*.md")]
    assert any(f"pictures/{name}.svg)" in page for page in pages)


@pytest.mark.parametrize("name", PICTURES)
def test_its_text_lies_within_it(name: str) -> None:
    picture = ET.fromstring(PICTURES[name]().svg())
    width = float(picture.attrib["width"])
    for text in picture.iter("{http://www.w3.org/2000/svg}text"):
        length = 0.62 * float(text.attrib["font-size"]) * len(text.text or "")
        start = float(text.attrib["x"])
        if text.attrib["text-anchor"] == "middle":
            start -= length / 2
        elif text.attrib["text-anchor"] == "end":
            start -= length
        assert start > -20, text.text
        assert start + length < width + 60, text.text


def test_each_table_is_in_one_cluster() -> None:
    tables = re.findall(r"^CREATE (?:UNLOGGED )?TABLE (\w+)", SCHEMA, re.MULTILINE)
    drawn = [name for cluster in schema.CLUSTERS for name in cluster.tables]
    assert sorted(drawn) == sorted(tables)


def test_the_columns_of_the_tables_exist() -> None:
    for cluster in schema.CLUSTERS:
        for name, shown in cluster.tables.items():
            found = re.search(rf"TABLE {name} \((.*?)\n\)", SCHEMA, re.DOTALL)
            assert found is not None
            for column in shown.replace(", …", "").split(", "):
                assert re.search(rf"^    {column} ", found[1], re.MULTILINE), (name, column)


def test_the_state_groups_are_those_of_the_worked_example() -> None:
    assert [group.path for group in groups()[:5]] == [
        ("R",),
        ("R", "a"),
        ("R", "a", "b"),
        ("R", "abc"),
        ("R", "abc", "d"),
    ]


def test_the_chain_cover_reaches_what_the_auth_events_reach() -> None:
    covered = chain_cover.cover()
    reached: dict[int, set[int]] = {}
    for number, event in enumerate(EVENTS, 1):
        reached[number] = set(event.auth_events).union(*(reached[a] for a in event.auth_events))
        for other, entry in covered.entries.items():
            found = chains.reaches(covered.closures[number], entry.position)
            assert found == (other in reached[number]), (number, other)


def test_the_fork_lies_between_two_numbers_of_the_main_line() -> None:
    numbers = audience_numbers.numbers()
    assert numbers.main[1] < numbers.fork[0].number < numbers.fork[1].number < numbers.main[2]
    assert [multirange.depth(one.number) for one in numbers.fork] == [1, 1]
    assert audience_numbers.written(numbers.fork[1].number) == "2 · 1 · 1"


def test_the_positions_do_not_cover_what_is_in_flight() -> None:
    vector = positions.position()
    assert not vector.covers("w2", positions.IN_FLIGHT["w2"])
    assert vector.linear() == 55


def test_the_phases_are_those_of_a_job() -> None:
    text = re.search(r"purge_jobs\.phase IS\n\s+'([^']*)'", SCHEMA)
    assert text is not None
    for name, *_ in purge_phases.PHASES:
        assert re.search(rf"\b{name}\b", text[1])
