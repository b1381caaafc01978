"""An import in a process of its own, to be killed.

Small rooms in small parts, so that there are many commits.
"""

import os
import sys

from storage.pipeline import import_archive
from storage.pipeline.session import session
from tests.pipeline.java import EXECUTOR, QUICK

SETTINGS = {
    "spark.driver.memory": "600m",
    "spark.executor.memory": "460m",
    "spark.driver.extraJavaOptions": QUICK,
    "spark.executor.extraJavaOptions": EXECUTOR,
    "spark.sql.shuffle.partitions": "2",
    "spark.default.parallelism": "2",
    "spark.pyspark.python": sys.executable,
    "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.ui.enabled": "false",
}


def main(archive: str, dsn: str, work: str, master: str = "local[2]") -> None:
    with session(master, SETTINGS, name="to be killed") as spark:
        summary = import_archive(
            spark, [archive], dsn, server_name="s1.test", work=work, writers=2, part=20
        )
        sys.stdout.write(f"{spark.sparkContext.getConf().get('spark.master')} {summary.outcomes}\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
