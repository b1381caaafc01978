"""`import_synapse`: a running Synapse into a store, again and again until the switch, from where the last time ended.

How far it has come is kept in a file: the largest stream ordering that was taken, the smallest (of history), the places of what lacked something,
and whose store they are of. It is written when an import has come to its end, in one step. So one that is interrupted is simply run again, and what it had stored are
duplicates; and where the file is lost, the next import looks at everything once more and stores what is new.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from storage.database.arrow import arrow_snapshot
from storage.errors import InputError
from storage.pipeline.imports.run import ImportSummary, import_archive
from storage.pipeline.source.token_bounds import deployment_of
from storage.pipeline.synapse.source import LACKING_MAX, OVERLAP, Synapse, SynapseCheckpoint


def import_synapse(
    spark: SparkSession, synapse_dsn: str, dsn: str, *, memory: str | Path | None = None, **how: Any
) -> ImportSummary:
    """Store the events of the Synapse whose database is ``synapse_dsn``; with a file ``memory``, those that came since the last time.

    Nothing is written to that database: every transaction is READ ONLY. ``how``: as of `import_archive`. `InputError` where the file is of
    another store or of another Synapse; else as `import_archive`.
    """
    since, lacking = (None, ()) if memory is None else recalled(Path(memory), dsn)
    source = Synapse.of(synapse_dsn, since, lacking)
    if since is not None and since.live > source.upto.live + OVERLAP:
        raise InputError(
            f"{memory}: this Synapse is only at {source.upto}, and the file at {since}: it is of another one"
        )
    summary = import_archive(spark, source, dsn, **how)
    if (
        memory is not None and len(summary.lacking) <= LACKING_MAX
    ):  # else the next import looks at all of it again
        keep(Path(memory), dsn, furthest(since, source.upto), summary.lacking)
    return summary


def furthest(since: SynapseCheckpoint | None, upto: SynapseCheckpoint) -> SynapseCheckpoint:
    """What was taken up to now: never less than before, though a Synapse may delete its last events."""
    return (
        upto
        if since is None
        else SynapseCheckpoint(max(since.live, upto.live), min(since.history, upto.history))
    )


def recalled(memory: Path, dsn: str) -> tuple[SynapseCheckpoint | None, tuple[int, ...]]:
    """What the file remembers; nothing where there is none.

    `InputError` for one that is of another store, or no such file.
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
                f"{memory} tells of an import into another database: give another file"
            )
    return position, lacking


def keep(memory: Path, dsn: str, position: SynapseCheckpoint, lacking: Sequence[int] = ()) -> None:
    """Remember how far an import into this store has come; the file is whole at any moment."""
    with arrow_snapshot(dsn) as conn:
        told = {
            "live": position.live,
            "history": position.history,
            "lacking": list(lacking),
            "deployment": deployment_of(conn),
        }
    begun = memory.with_name(memory.name + ".new")
    begun.write_text(json.dumps(told) + "\n", encoding="utf-8")
    begun.replace(memory)
