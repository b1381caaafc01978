"""The tables of the peer, in the README and on its page, are those of the committed results."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import readme
from benchmarks.figures import read
from benchmarks.harness import RESULTS


@pytest.mark.parametrize(
    "path,made", [(readme.README, readme.short), (readme.PAGE, readme.rendered)]
)
def test_a_page_has_the_table_of_the_committed_results(
    path: Path, made: Callable[[dict[str, Any]], str]
) -> None:
    text = path.read_text(encoding="utf-8")
    assert readme.with_table(text, made(read(RESULTS / "peer.json"))) == text
    other = read(RESULTS / "peer.json")
    other["results"]["writes"]["8 rooms at once"]["ours"]["events_per_second"]["median"] *= 3
    assert readme.with_table(text, made(other)) != text


def test_the_short_table_is_short() -> None:
    lines = readme.short(read(RESULTS / "peer.json")).splitlines()
    assert len([line for line in lines if line.startswith("|")]) == 2 + 8


def test_the_committed_results_are_of_a_full_run_of_a_commit() -> None:
    told = read(RESULTS / "peer.json")
    assert not told["quick"]
    assert not told["on"]["changed_since"]
    assert told["results"].keys() >= {"peer", "writes"}
    assert len(readme.GOALS.keys() & told["results"]["writes"].keys()) == 6
    for one in told["results"]["writes"].values():
        assert one["rounds"] >= 3
