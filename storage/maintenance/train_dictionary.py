"""Train a dictionary on events of this deployment, and keep it if it is better.

Half of the rooms of a sample (`storage.maintenance.event_sample`) are for training. The events of
the others are encoded as a writer does, with the present dictionary and with the new one. So a
dictionary is never compared by the events that it was made of.

The new dictionary is stored if it saves `WORTH` at least. Writers use it from then on, and
`room-storage jobs --re-encode` encodes older events with it.
"""

import random
import time
from dataclasses import dataclass
from typing import Any, Final, LiteralString

from zstandard import ZstdError

from storage.codec import Dictionary, encode, shipped_dictionary, train
from storage.database.connection import Database
from storage.errors import InputError
from storage.maintenance.event_sample import SampledEvent, sample_events
from storage.observability.progress import Counted, Report, silent
from storage.persist.write.stored_form import writers_dictionary
from storage.streams.caches import DICTIONARIES
from storage.streams.invalidate_caches import invalidate_caches, register_writer

EVENTS: Final = 20_000
EVENTS_MIN: Final = 200
WORTH: Final = 0.02
"""A dictionary is stored if it saves this share of the bytes."""

SQL_STORE: Final[LiteralString] = """
WITH added AS (
    INSERT INTO dictionaries (dictionary_id, events, trained_ts, data)
    VALUES ($1::int, $2::int, $3::bigint, $4::bytea)
    ON CONFLICT (dictionary_id) DO NOTHING
    RETURNING dictionary_id
)
SELECT EXISTS (SELECT FROM added)
    OR EXISTS (SELECT FROM dictionaries WHERE dictionary_id = $1::int AND data = $4::bytea)
"""


@dataclass(frozen=True, slots=True)
class Trained:
    """The result: both dictionaries, and the bytes of an average event with each.

    ``received_bytes``: of such an event as it was received. ``is_better``: the new dictionary saves
    enough to be stored; ``is_stored``: it is stored.
    """

    events: int
    compared: int
    received_bytes: float
    present_id: int
    present_bytes: float
    trained_id: int
    trained_bytes: float
    is_better: bool
    is_stored: bool


async def train_dictionary(
    database: Database,
    *,
    events: int = EVENTS,
    dry_run: bool = False,
    seed: int | None = None,
    report: Report = silent,
) -> Trained:
    """Train a dictionary on about so many events, half of them; store it if it is better.

    Writers and readers may go on. ``dry_run`` stores nothing. The same ``seed`` chooses the same
    events. Raise `InputError` if there are too few.
    """
    if events < EVENTS_MIN:
        raise InputError(f"a dictionary is trained on {EVENTS_MIN} events at least, not {events}")
    seed = random.randrange(2**31) if seed is None else seed  # noqa: S311  # no secret
    async with database.connection() as conn:
        sample = await sample_events(conn, events, seed)
        present = await writers_dictionary(conn)
    training, compared = _halves(sample, seed)
    if len(training) < EVENTS_MIN // 2 or not compared:
        raise InputError(f"a dictionary needs more events: the sample has {len(sample)}")
    counted = Counted(report, "train", 2 * len(compared), "events")
    trained = _trained(training)
    sizes = [_encoded_bytes(compared, one, counted) for one in (present, trained)]
    is_better = sizes[1] <= (1 - WORTH) * sizes[0]
    is_stored = is_better and not dry_run
    if is_stored:
        await store_dictionary(database, trained, len(training))
    mean = [round(size / len(compared), 1) for size in sizes]
    received = round(sum(len(one.raw) for one in compared) / len(compared), 1)
    return Trained(
        *(len(training), len(compared), received, present.id, mean[0], trained.id, mean[1]),
        is_better=is_better,
        is_stored=is_stored,
    )


def _halves(sample: list[SampledEvent], seed: int) -> tuple[list[SampledEvent], list[SampledEvent]]:
    """Return the events of half of the rooms, and the others; of one room the halves."""
    rooms = sorted({one.room_id for one in sample})
    random.Random(seed).shuffle(rooms)  # noqa: S311  # no secret
    if len(rooms) == 1:
        return sample[::2], sample[1::2]
    first = set(rooms[::2])
    return (
        [one for one in sample if one.room_id in first],
        [one for one in sample if one.room_id not in first],
    )


def _trained(events: list[SampledEvent]) -> Dictionary:
    try:
        return Dictionary(train((one.raw, one.room_id) for one in events))
    except ZstdError as error:
        raise InputError(
            f"these events are too few or too much alike to train on: {error}"
        ) from error


def _encoded_bytes(events: list[SampledEvent], dictionary: Dictionary, counted: Counted) -> int:
    sizes = 0
    for one in events:
        form: Any = encode(one.raw, one.event_id, one.room_id, dictionary)
        sizes += len(form)
    counted.add(len(events))
    return sizes


async def store_dictionary(database: Database, dictionary: Dictionary, events: int) -> None:
    """Store it, and publish it to the writers of all processes. None uses it before the commit."""
    shipped = shipped_dictionary()
    await register_writer(database)
    async with database.transaction() as conn:
        now_ms, id_ = time.time_ns() // 1_000_000, dictionary.id
        is_stored = await conn.fetchval(SQL_STORE, id_, events, now_ms, dictionary.data)
        if not is_stored or (id_ == shipped.id and dictionary.data != shipped.data):
            raise InputError("another dictionary has this number by chance: train again")
        await invalidate_caches(conn, DICTIONARIES)
