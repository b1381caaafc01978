"""The profile of an append: to which part a file's time counts, and the page."""

from pathlib import Path

import storage
from benchmarks import profile
from tests.benchmarks.test_results import document

ROOT = Path(storage.__file__).parents[1]


def test_each_file_of_the_engine_belongs_to_a_part_and_each_part_has_files() -> None:
    files = [str(path) for path in ROOT.glob("storage/**/*.py")]
    for part in profile.PARTS:
        for begin in part.files:
            assert begin.startswith("asyncpg/") or any(f"/{begin}" in file for file in files), begin
    assert profile.ELSEWHERE not in set(map(profile.part_of, files))
    assert profile.part_of(f"{ROOT}/storage/event/hashes.py") == "read and hash"
    assert (
        profile.part_of(f"{ROOT}/storage/persist/write/all_tables.py")
        == profile.part_of(f"{ROOT}/storage/persist/write/messages_only.py")
        == "rows"
    )
    assert profile.part_of(f"{ROOT}/storage/persist/commit/group_commit.py") == "queue and commit"
    assert profile.part_of("/usr/lib/python3/site-packages/asyncpg/connection.py") == "driver"
    assert profile.part_of("") == profile.ELSEWHERE


def test_the_page_tells_each_part_that_was_met() -> None:
    one = {
        "python_us": {"rows": 3.0, "authorise": 1.5},
        "python_all_us": 4.5,
        "of_it_collector_us": 0.5,
        "postgres_us": {"the statement": 60.0, "log and pages": 2.0},
        "clock_us": 99.0,
    }
    other = one | {"python_us": {"rows": 1_000.0, "driver": 2.0}}
    lines = profile.page(document(one=one, other=other)).splitlines()
    told = {cells[1].strip(): cells[2:4] for line in lines if len(cells := line.split("|")) == 6}
    assert told["authorise"] == [" 1.5 ", " 0.0 "]
    assert told["rows"] == [" 3.0 ", " 1,000.0 "]
    assert told["driver"] == [" 0.0 ", " 2.0 "]
    assert told["**Postgres, the statement**"] == [" 60.0 ", " 60.0 "]
    assert "read and hash" not in told
    assert list(told).index("authorise") < list(told).index("rows") < list(told).index("driver")
