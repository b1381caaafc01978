"""Train the dictionary that the package ships, on generated events of common types.

    python -m benchmarks.train_first_dictionary

It writes `storage/codec/first_dictionary.b64`, in base64. Rows name the dictionary by its digest,
so its bytes never change after a release. A better one gets another file.
"""

from base64 import encodebytes
from typing import Final

from benchmarks.codec_events import RealEvent, mixed
from storage.codec import train
from storage.codec.dictionaries import SHIPPED_FILE

SHARES: Final = {"11": 4_000, "10": 2_000, "12": 2_000, "6": 1_000, "1": 1_000}
"""Events by room version. Those of version 1 are compressed whole, so they bring the usual keys."""


def sample() -> list[RealEvent]:
    """Return the events to train on."""
    return [
        event
        for seed, (version, count) in enumerate(SHARES.items(), 1)
        for event in mixed(count, seed=1_000 * seed, version=version)
    ]


if __name__ == "__main__":
    data = train(((one.raw, one.room_id) for one in sample()), are_private=False)
    SHIPPED_FILE.write_bytes(encodebytes(data))
    print(f"{SHIPPED_FILE.name}: {len(data):,} bytes")
