"""`import_synapse`: import from a running Synapse repeatedly, until the server is switched.

Each import continues where the last one ended. Its checkpoint is a file: the largest and the
smallest (history) stream ordering that it read, the positions of events with missing dependencies,
and the store's id. The file is written atomically when an import has finished. An interrupted
import is run again; the events that it had stored are duplicates. If the file is lost, the next
import reads everything again and stores what is new.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from storage.database.arrow_results import arrow_snapshot
from storage.errors import InputError
from storage.pipeline.imports.run import ImportSummary, import_archive
from storage.pipeline.source.token_bounds import deployment_of
from storage.pipeline.synapse.source import LACKING_MAX, OVERLAP, Synapse, SynapseCheckpoint


def import_synapse(
    spark: SparkSession, synapse_dsn: str, dsn: str, *, memory: str | Path | None = None, **how: Any
) -> ImportSummary:
    """Store the events of the Synapse whose database is ``synapse_dsn``.

    With a checkpoint file ``memory``, store those that came since the last import. Nothing is
    written to Synapse's database: every transaction is READ ONLY. ``how``: as for `import_archive`.
    Raise `InputError` if the file is of another store or another Synapse, and otherwise as
    `import_archive`.
    """
    since, lacking = (None, ()) if memory is None else recalled(Path(memory), dsn)
    source = Synapse.of(synapse_dsn, since, lacking)
    if since is not None and since.live > source.upto.live + OVERLAP:
        raise InputError(
            f"{memory}: this Synapse is only at {source.upto}, and the file at {since}:"
            " it is of another one"
        )
    summary = import_archive(spark, source, dsn, **how)
    # otherwise the next import reads all of it again
    if memory is not None and len(summary.lacking) <= LACKING_MAX:
        keep(Path(memory), dsn, furthest(since, source.upto), summary.lacking)
    return summary


def furthest(since: SynapseCheckpoint | None, upto: SynapseCheckpoint) -> SynapseCheckpoint:
    """Return the furthest position read: never less than before, even if Synapse deletes events."""
    return (
        upto
        if since is None
        else SynapseCheckpoint(max(since.live, upto.live), min(since.history, upto.history))
    )


def recalled(memory: Path, dsn: str) -> tuple[SynapseCheckpoint | None, tuple[int, ...]]:
    """Return the content of the checkpoint file; nothing where there is none.

    Raise `InputError` for a file of another store, or with other content.
    """
    if not memory.exists():
        return None, ()
    try:
        kept = json.loads(memory.read_bytes())
        position = SynapseCheckpoint(int(kept["live"]), int(kept["history"]))
        lacking = tuple(map(int, kept.get("lacking", ())))
        of = str(kept["deployment"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{memory} does not say how far an import has come: {error}") from None
    with arrow_snapshot(dsn) as conn:
        if deployment_of(conn) != of:
            raise InputError(
                f"{memory} belongs to an import into another database: give another file"
            )
    return position, lacking


def keep(memory: Path, dsn: str, position: SynapseCheckpoint, lacking: Sequence[int] = ()) -> None:
    """Write the checkpoint of an import into this store, atomically."""
    with arrow_snapshot(dsn) as conn:
        content = {
            "live": position.live,
            "history": position.history,
            "lacking": list(lacking),
            "deployment": deployment_of(conn),
        }
    begun = memory.with_name(memory.name + ".new")
    begun.write_text(json.dumps(content) + "\n", encoding="utf-8")
    begun.replace(memory)
