"""Bulk work that outgrows one process, on Spark.

Only this package imports pyspark; it needs the extra `spark` and Java 17.

  source/        `RoomEvents`, the data source: reader, filters, options, rows, token_bounds; stream
                 has its streaming reads
  imports/       `import_archive` (run.py) and writes of data frames (stage_rows.py), in two steps:
                   each line by itself: lines, validate; stage stores the bytes, and intern_names
                   bundles of events without bytes
                   rooms that the store does not have: load_rooms, plan_rooms, with the planner of
                   `storage.rebuild`; rooms that it has: append_events
  synapse/       a Synapse's database as a source, and `import_synapse`, which keeps a checkpoint
  export.py     `export_parquet`
  mirroring.py  `mirror` and `mirrored`; lake/ has the work, and needs the extra `lake`
  answers.py    `answers`: `QUESTIONS` about a mirror, refreshed by the days that changed
  verify_rooms.py  `verify` and `rebuild`, with `storage.rebuild` in each task
  stats/         `statistics`, and its page with plots
  session.py  turns failures in executors into our errors; a Spark session with settings for one
              machine
"""

from storage.errors import ExtraMissing

try:
    from storage.pipeline.answers import MirrorAnswer, answers
    from storage.pipeline.export import Export, export_parquet
    from storage.pipeline.imports.run import ImportSummary, import_archive
    from storage.pipeline.lake.questions import QUESTIONS, Question
    from storage.pipeline.mirroring import mirror, mirrored
    from storage.pipeline.source.reader import RoomEvents
    from storage.pipeline.stats.aggregate import Statistics, statistics
    from storage.pipeline.synapse.checkpoint import import_synapse
    from storage.pipeline.synapse.source import Synapse
    from storage.pipeline.verify_rooms import rebuild, verify
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(str(ExtraMissing("Spark", "spark")), name=error.name) from error

__all__ = [
    "QUESTIONS",
    "Export",
    "ImportSummary",
    "MirrorAnswer",
    "Question",
    "RoomEvents",
    "Statistics",
    "Synapse",
    "answers",
    "export_parquet",
    "import_archive",
    "import_synapse",
    "mirror",
    "mirrored",
    "rebuild",
    "statistics",
    "verify",
]
