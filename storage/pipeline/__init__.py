"""Bulk work that outgrows one process, on Spark. The only place that imports pyspark; needs the extra `spark` and Java 17.

source, options, positions, selecting, rows    `RoomEvents`: reading the store, as a data source
streaming, sink                                its streaming reads and its writes
importing                                      `import_archive`, in two stages:
  archives, reading, synapse, examining        lines, each by itself; staging keeps the bytes, slim what goes on
  loading, rooms, planning, bulk, interning    rooms that the store does not hold; appending, ordering: those that it holds
following                                      `import_synapse`, which remembers how far it has come
exporting                                      `export_parquet`
checking, rebuilding                           `verify` and `rebuild`
counting, page                                 `statistics`, and its page with plots
failures                                       what failed in an executor, as one of our errors
session                                        a Spark session that suits this machine
"""

from storage.pipeline.checking import rebuild, verify
from storage.pipeline.counting import Statistics, statistics
from storage.pipeline.exporting import Export, export_parquet
from storage.pipeline.following import import_synapse
from storage.pipeline.importing import ImportSummary, import_archive
from storage.pipeline.source import RoomEvents
from storage.pipeline.synapse import Synapse

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
