"""The bytes that stored forms of events take, and that encoding would save: by a sample."""

from typing import Any, Final, NamedTuple

from storage.codec import encode, is_plain
from storage.database.connection import Connection
from storage.maintenance.event_sample import sample_events
from storage.persist.write.stored_form import writers_dictionary

EVENTS: Final = 2_000
SEED: Final = 1
"""The same events each time, as long as the table is the same."""


class StoredForms(NamedTuple):
    """The bytes of an average event of the sample, of so many events.

    ``received_bytes``: as received; ``stored_bytes``: as stored now; ``encoded_bytes``: as a writer
    encodes it today. ``plain_events``: stored as the bytes themselves.
    """

    events: int
    plain_events: int
    received_bytes: float
    stored_bytes: float
    encoded_bytes: float

    @property
    def saving(self) -> float:
        """Return the bytes of an event that encoding all events again would save."""
        return max(round(self.stored_bytes - self.encoded_bytes, 1), 0.0)


async def stored_forms(conn: Connection) -> StoredForms:
    """Measure a sample."""
    sample = await sample_events(conn, EVENTS, SEED)
    dictionary = await writers_dictionary(conn)
    sizes = [0, 0, 0]
    for one in sample:
        stored: Any = one.stored
        new: Any = encode(*one[:3], dictionary)
        for at, form in enumerate((one.raw, stored, min(stored, new, key=len))):
            sizes[at] += len(form)
    count = max(len(sample), 1)
    means = [round(size / count, 1) for size in sizes]
    return StoredForms(len(sample), sum(is_plain(one.stored) for one in sample), *means)
