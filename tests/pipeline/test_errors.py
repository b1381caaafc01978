"""A failure in an executor becomes one error of ours that says what is missing.

Nothing is half done, and running the same again completes it.
"""

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import asyncpg
import pytest
from pyspark.sql import SparkSession

from storage.errors import DatabaseUnavailable, StorageError
from storage.pipeline import export_parquet, import_archive
from storage.testing import SHAPES, GeneratedRoom, generate_room, write_ndjson
from tests.long_run import long_run
from tests.pipeline.stores import SERVER, fill, tables
from tests.small_disks import grow, mounted

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]

GRANTS = """
GRANT ALL ON ALL TABLES IN SCHEMA public TO few;
GRANT ALL ON ALL SEQUENCES IN SCHEMA public TO few
"""
RIGHTS = "SELECT has_table_privilege('few', 'import_events', 'TRUNCATE')"


@pytest.fixture
def rooms(tmp_path: Path) -> Sequence[GeneratedRoom]:
    made = [generate_room(SHAPES["small_chat"], 60, seed=seed, sign=False) for seed in range(4)]
    write_ndjson((event for room in made for event in room), tmp_path / "rooms.ndjson")
    return made


async def test_executors_that_do_not_reach_the_database(
    spark: SparkSession,
    dsn: str,
    another_dsn: str,
    tmp_path: Path,
    rooms: Sequence[GeneratedRoom],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The DSN names no host: the driver's environment has it, that of the executors does not."""
    parts = urlsplit(dsn)
    query = parse_qs(parts.query)
    monkeypatch.setenv("PGHOST", query["host"][0])
    monkeypatch.setenv("PGPORT", query["port"][0])
    lame = f"postgresql://{parts.username}@{parts.path}"
    with pytest.raises(DatabaseUnavailable, match="in an executor"):
        import_archive(spark, [str(tmp_path / "rooms.ndjson")], lame, server_name=SERVER)
    await same_again(spark, dsn, another_dsn, tmp_path, rooms)
    with pytest.raises(DatabaseUnavailable, match="in an executor"):
        export_parquet(spark, lame, str(tmp_path / "export"))
    assert not list((tmp_path / "export").rglob("*.json"))


@pytest.fixture
async def few(dsn: str) -> AsyncIterator[asyncpg.Connection]:
    """A role that may have two connections; what gives it more."""
    connection = await asyncpg.connect(dsn)
    await connection.execute("CREATE ROLE few LOGIN CONNECTION LIMIT 2")
    await connection.execute(GRANTS)
    assert await connection.fetchval(RIGHTS)
    yield connection
    await connection.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'few'"
    )
    await connection.execute("DROP OWNED BY few; DROP ROLE few")
    await connection.close()


@long_run
async def test_too_few_connections(
    spark: SparkSession,
    dsn: str,
    another_dsn: str,
    tmp_path: Path,
    rooms: Sequence[GeneratedRoom],
    few: asyncpg.Connection,
) -> None:
    """One is the driver's, and each of two tasks takes two."""
    by_few = dsn.replace(f"{urlsplit(dsn).username}@", "few@", 1)
    with pytest.raises(DatabaseUnavailable, match="too many connections"):
        import_archive(spark, [str(tmp_path / "rooms.ndjson")], by_few, server_name=SERVER)
    assert (
        await few.fetchval(
            "SELECT count(*) FROM (SELECT room_id FROM rooms JOIN events USING (room_nid) "
            "GROUP BY 1 HAVING count(*) <> 60) r"
        )
        == 0
    )
    await few.execute("ALTER ROLE few CONNECTION LIMIT 5")
    await same_again(spark, by_few, another_dsn, tmp_path, rooms, dsn)


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A file system of 12 kB."""
    with mounted("12k") as place:
        yield place


async def test_a_full_disk_between_the_stages(
    spark: SparkSession,
    dsn: str,
    another_dsn: str,
    tmp_path: Path,
    rooms: Sequence[GeneratedRoom],
    small_disk: Path,
) -> None:
    """The data between two stages does not fit; with more space the same import completes."""
    with pytest.raises(StorageError, match="No space left on device"):
        import_archive(
            spark, [str(tmp_path / "rooms.ndjson")], dsn, server_name=SERVER, work=str(small_disk)
        )
    grow(small_disk, "50M")
    summary = import_archive(
        spark, [str(tmp_path / "rooms.ndjson")], dsn, server_name=SERVER, work=str(small_disk)
    )
    assert summary.outcomes["duplicate"] == 0
    await compare(dsn, another_dsn, rooms)


async def same_again(
    spark: SparkSession,
    target: str,
    another_dsn: str,
    folder: Path,
    rooms: Sequence[GeneratedRoom],
    dsn: str | None = None,
) -> None:
    import_archive(spark, [str(folder / "rooms.ndjson")], target, server_name=SERVER)
    await compare(dsn or target, another_dsn, rooms)


async def compare(dsn: str, another_dsn: str, rooms: Sequence[GeneratedRoom]) -> None:
    for room in rooms:
        await fill(another_dsn, room)
    assert await tables(dsn) == await tables(another_dsn)
