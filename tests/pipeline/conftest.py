"""One small Spark session for all tests of the pipeline; none where Java is missing."""

from collections.abc import AsyncIterator, Iterator

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from storage.errors import InputError
from storage.pipeline.session import check_java, session
from tests.conftest import _fresh_database

SMALL = {
    "spark.driver.memory": "600m",
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
}


@pytest.fixture
async def another_dsn(server_dsn: str, template_name: str, worker_id: str) -> AsyncIterator[str]:
    """A second migrated database of the test's own."""
    async with _fresh_database(server_dsn, template_name, worker_id) as fresh:
        yield fresh


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    try:
        check_java()
    except InputError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("spark")
    conf = {**SMALL, "spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.local.dir": str(folder / "local")}
    with session("local[2]", conf, name="tests") as opened:
        yield opened
