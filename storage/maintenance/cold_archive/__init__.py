"""The cold archive: stored forms of old events in packs, and references to them in `events.json`.

    run     archive events: write packs, then change the events to refer to them
    back    return events to the table
    sweep   remove what purges and censoring have left in packs, and packs that are empty
    owner   the one database that may change the files of a folder

Readers need none of these (`storage.database.archived_bytes`). One process at a time changes the
archive; writers, purges and censoring may run meanwhile.
"""

from storage.maintenance.cold_archive.back import Returned, return_events
from storage.maintenance.cold_archive.run import Archived, archive_events
from storage.maintenance.cold_archive.sweep import Swept, sweep, sweep_if_free

__all__ = [
    "Archived",
    "Returned",
    "Swept",
    "archive_events",
    "return_events",
    "sweep",
    "sweep_if_free",
]
