"""Import, read, export, verify and rebuild through Spark Connect, in a process of its own.

A process has sessions of one kind. The server is in the wheel of pyspark.
"""

import asyncio
import json
import os
import sys

import asyncpg

from storage.errors import StorageError
from storage.pipeline import RoomEvents, export_parquet, import_archive, rebuild, verify
from tests.pipeline.java import QUICK


async def no_more_rooms(dsn: str) -> None:
    """Make the executors fail that store another room."""
    conn = await asyncpg.connect(dsn)
    await conn.execute("""
        CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql
        AS $$ BEGIN RAISE 'no more rooms'; END $$;
        CREATE TRIGGER refuse BEFORE INSERT ON rooms EXECUTE FUNCTION refuse()
    """)
    await conn.close()


def main(archive: str, more: str, dsn: str, folder: str) -> None:
    os.environ["PYSPARK_PYTHON"] = sys.executable
    os.environ["PYSPARK_SUBMIT_ARGS"] = f"--driver-java-options '{QUICK}' pyspark-shell"
    from pyspark.sql import SparkSession  # noqa: PLC0415  # it reads the environment

    spark = SparkSession.builder.remote("local[2]").getOrCreate()
    try:
        spark.dataSource.register(RoomEvents)
        summary = import_archive(
            spark, [archive], dsn, server_name="s1.test", rejects=f"{folder}/rejects"
        )
        events = spark.read.format("room_events").option("dsn", dsn).load().count()
        made = export_parquet(spark, dsn, f"{folder}/export", partitions=2)
        findings = verify(spark, dsn).count()
        failed = rebuild(spark, dsn)
        asyncio.run(no_more_rooms(dsn))
        error = ""
        try:
            import_archive(spark, [more], dsn, server_name="s1.test")
        except StorageError as raised:
            error = str(raised)
    finally:
        spark.stop()
    found = {
        "session": type(spark).__module__,
        "outcomes": dict(summary.outcomes),
        "events": events,
        "exported": made.events,
        "findings": findings,
        "failed": failed,
        "error": error,
    }
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
