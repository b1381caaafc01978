"""Bulk work that outgrows one process, on Spark.

The only place that imports pyspark; needs the extra `spark` and Java 17.

source/        `RoomEvents`, the data source: reader, filters, options, rows, token_bounds; stream
               is its streaming reads
imports/       `import_archive` (run.py) and writes of data frames (data_frame_writer.py), in two
               stages:
                 lines, each by itself: archive_files, lines, validate; stage keeps the bytes,
                 slim_event what goes on rooms that the store does not hold: load_rooms,
                 room_bundles, plan_rooms, bulk_write, intern_names; rooms that it holds:
                 append_events, line_order
synapse/       a Synapse's database as a source, and `import_synapse`, which keeps a checkpoint
export.py      `export_parquet`
verify_rooms.py, rebuilding/   `verify` and `rebuild`
stats/         `statistics`, and its page with plots
failures.py    failures in executors, as one of our errors
session.py     a Spark session that suits this machine
"""

from storage.pipeline.export import Export, export_parquet
from storage.pipeline.imports.run import ImportSummary, import_archive
from storage.pipeline.source.reader import RoomEvents
from storage.pipeline.stats.aggregate import Statistics, statistics
from storage.pipeline.synapse.checkpoint import import_synapse
from storage.pipeline.synapse.source import Synapse
from storage.pipeline.verify_rooms import rebuild, verify

__all__ = [
    "Export",
    "ImportSummary",
    "RoomEvents",
    "Statistics",
    "Synapse",
    "export_parquet",
    "import_archive",
    "import_synapse",
    "rebuild",
    "statistics",
    "verify",
]
