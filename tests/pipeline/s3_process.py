"""Export to S3, import from there, and mirror to it, in a process with its own environment.

The executors of a local master have the environment in which Spark started.
"""

import json
import sys

from storage.pipeline import export_parquet, import_archive, mirror
from storage.pipeline.export import last_export
from storage.pipeline.session import session
from tests.pipeline.import_process import SETTINGS


def main(dsn: str, another_dsn: str, bucket: str) -> None:
    with session("local[2]", SETTINGS, name="s3") as spark:
        made = export_parquet(spark, dsn, f"{bucket}/export", partitions=2)
        found = last_export(f"{bucket}/export")
        summary = import_archive(
            spark,
            [f"{bucket}/export/events", f"{bucket}/broken.ndjson"],
            another_dsn,
            server_name="s1.test",
            room_version="11",
            work=f"{bucket}/work",
            rejects=f"{bucket}/rejects",
        )
        mirror(spark, dsn, f"{bucket}/mirror", ("events",), once=True)
    result = {
        "exported": made.events,
        "last": found == made,
        "outcomes": dict(summary.outcomes),
    }
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
