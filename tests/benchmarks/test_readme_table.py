"""The README's tables of the peer are those of the committed results."""

from benchmarks import readme
from benchmarks.figures import read
from benchmarks.harness import RESULTS


def test_the_readme_has_the_table_of_the_committed_results() -> None:
    text = readme.README.read_text(encoding="utf-8")
    assert readme.with_table(text, read(RESULTS / "peer.json")) == text
    other = read(RESULTS / "peer.json")
    other["results"]["writes"]["8 rooms at once"]["ours"]["events_per_second"]["median"] *= 3
    assert readme.with_table(text, other) != text


def test_the_committed_results_are_of_a_full_run_of_a_commit() -> None:
    told = read(RESULTS / "peer.json")
    assert not told["quick"]
    assert not told["on"]["changed_since"]
    assert told["results"].keys() >= {"peer", "writes"}
    assert len(readme.GOALS.keys() & told["results"]["writes"].keys()) == 4
    for one in told["results"]["writes"].values():
        assert one["rounds"] >= 3
