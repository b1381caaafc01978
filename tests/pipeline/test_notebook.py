"""The notebook of `examples/`: its cells compile, and it runs on a small mirror."""

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import storage
from storage.pipeline import mirror
from tests.long_run import long_run
from tests.pipeline import notebook
from tests.pipeline.stores import SERVER
from tests.pipeline.test_questions import DAYS, signs, spread

pytestmark = [pytest.mark.xdist_group("spark"), pytest.mark.timeout(600)]


def test_its_cells_compile() -> None:
    for code in notebook.cells():
        compile(code, "cell", "exec")
    assert "answers(spark, MIRROR)" in notebook.cells()[0]
    assert '"outputs": []' in notebook.NOTEBOOK.read_text("utf-8")


@long_run
async def test_the_notebook_runs(
    spark: SparkSession, dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with storage.open(dsn, server_name=SERVER) as store:
        await store.append(signs().pdus, room_version="11")
        await spread(store, 0, DAYS)
    mirror(None, dsn, str(tmp_path), ("events",), once=True)
    monkeypatch.setenv("MIRROR", str(tmp_path))
    names = notebook.run()
    assert names["spark"].sparkContext is spark.sparkContext
    names["figure"].savefig(tmp_path / "picture.png")
    assert [len(one.lines) + len(one.patches) + len(one.collections) for one in names["axes"].flat]
    assert all(one.has_data() for one in (names["axes"][0, 0], names["axes"][1, 1]))
    assert len(names["signs"]["bodies"]) > 0
    names["plt"].close("all")
