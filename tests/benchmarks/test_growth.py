"""Growth of reads by the state of statistics: what is measured, and what the page says."""

from pathlib import Path
from typing import Any

import pytest
import uvloop

from benchmarks import growth, readme
from benchmarks.figures import read
from benchmarks.harness import RESULTS, Bench, bench_server
from benchmarks.statistics_states import STATES
from storage.store.catalogue import QUESTIONS


def test_each_read_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "STATES", STATES[:1])
    with bench_server() as server:
        bench = Bench("growth", server, results_folder=tmp_path, quick=True)
        uvloop.run(growth.run(bench))
    told = read(tmp_path / "growth.quick.json")["results"]
    assert told.keys() == {STATES[0].name}
    assert told[STATES[0].name].keys() == QUESTIONS.keys()
    for one in told[STATES[0].name].values():
        assert one["growth"] > 0
        assert one["large"]["rows"] > 0


def figures(growth_of: float, ms: float) -> dict[str, Any]:
    one = {"small": {"cpu_ms": 1.0, "rows": 10}, "large": {"cpu_ms": ms, "rows": 12}}
    reads = {name: {**one, "growth": growth_of, "growth_of_rows": 1.2} for name in QUESTIONS}
    return {"results": {"alone": reads}}


def test_the_page_names_what_is_beyond_the_goals() -> None:
    assert growth.rendered(figures(1.5, 2.0)).endswith("All are within the goals.")
    assert growth.rendered(figures(1.0, 2.1)).count("\n- ") == len(growth.PAGES)
    assert growth.rendered(figures(1.6, 1.0)).count("\n- ") == len(QUESTIONS)


def test_the_page_has_the_table_of_the_committed_results() -> None:
    page = readme.GROWTH_PAGE.read_text(encoding="utf-8")
    path = RESULTS / "growth.json"
    text = growth.rendered(read(path)) if path.exists() else "The table is written by"
    assert text in page
    assert readme.with_table(page, "other", readme.GROWTH_BEGIN) != page
