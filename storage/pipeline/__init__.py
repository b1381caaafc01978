"""Bulk work that outgrows one process, on Spark. The only place that imports pyspark; needs the extra `spark` and Java 17.

source, options, positions, selecting, rows    `RoomEvents`: reading the store, as a data source
streaming, sink                                its streaming reads and its writes
session                                        a Spark session that suits this machine
"""

from storage.pipeline.source import RoomEvents

__all__ = ["RoomEvents"]
