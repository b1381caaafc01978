"""An import in a process of its own, to be killed. Small rooms in small parts, so that there are many commits."""

import sys

from storage.pipeline import import_archive
from storage.pipeline.session import session

SETTINGS = {
    "spark.driver.memory": "600m",
    "spark.sql.shuffle.partitions": "2",
}


def main(archive: str, dsn: str, work: str) -> None:
    with session("local[2]", SETTINGS, name="to be killed") as spark:
        import_archive(spark, [archive], dsn, server_name="s1.test", work=work, writers=2, part=20)


if __name__ == "__main__":
    main(*sys.argv[1:])
