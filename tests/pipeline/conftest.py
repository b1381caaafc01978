"""One small Spark session for all tests of the pipeline; none where Java is missing."""

from collections.abc import Iterator

import pytest

pytest.importorskip("pyspark")

from pyspark.sql import SparkSession

from storage.errors import InputError
from storage.pipeline.session import check_java, session
from tests.pipeline.java import QUICK

SMALL = {
    "spark.driver.memory": "600m",
    "spark.driver.extraJavaOptions": QUICK,
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
}


@pytest.fixture(scope="session")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    try:
        check_java()
    except InputError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("spark")
    conf = {
        **SMALL,
        "spark.sql.warehouse.dir": str(folder / "warehouse"),
        "spark.local.dir": str(folder / "local"),
    }
    with session("local[2]", conf, name="tests") as opened:
        yield opened
