"""Read Parquet as lines: each row becomes the envelope that `storage.event.ndjson` reads.

It needs pyarrow (the extra `spark`). Columns: ``pdu`` (the received bytes), and optionally
``room_version``, ``origin``, ``state_before``, ``refused``, ``rejected`` and ``arrival_ordering``,
as in the files of `room-storage spark export`. Other columns are ignored. A row with
``arrival_ordering`` is of a readmitted event, and becomes two lines: refused, and readmitted. Of
``rejected`` only a second create event counts.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from storage.errors import ExtraMissing, InputError
from storage.event.ndjson import READMITTED, SECOND_CREATE, envelope

COLUMNS: Final = (
    "pdu",
    "room_version",
    "origin",
    "state_before",
    "refused",
    "rejected",
    "arrival_ordering",
)
ROWS_MAX: Final = 500
"""Rows read at a time."""

ENVELOPE_BYTES: Final = 64
"""The approximate size of an envelope without its PDU."""


def parquet_bytes(source: str) -> int:
    """Return the approximate number of bytes of its lines.

    Raise `InputError` if it is no Parquet or has no column ``pdu`` of bytes, else `ExtraMissing`.
    """
    with _opened(source) as file:
        names = file.schema_arrow.names
        if "pdu" not in names or not str(file.schema_arrow.field("pdu").type).endswith("binary"):
            raise InputError(f"{source}: there is no column pdu of bytes")
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        columns = [group.column(at) for group in groups for at in range(group.num_columns)]
        pdus = sum(
            column.total_uncompressed_size for column in columns if column.path_in_schema == "pdu"
        )
        return int(pdus + file.metadata.num_rows * ENVELOPE_BYTES)


def read_parquet(source: str) -> Iterator[list[bytes]]:
    """Yield the rows as envelopes, in pages. Raise `InputError` if reading fails midway."""
    with _opened(source) as file:
        names = [name for name in COLUMNS if name in file.schema_arrow.names]
        for batch in file.iter_batches(ROWS_MAX, columns=names):
            yield [line for row in batch.to_pylist() for line in _lines(row)]


def _lines(row: dict[str, Any]) -> list[bytes]:
    pdu, version, origin = row["pdu"] or b"", row.get("room_version"), row.get("origin")
    state = row.get("state_before")
    if row.get("arrival_ordering") is None:
        second = str(row.get("rejected")).startswith(SECOND_CREATE)
        refused = row.get("refused")
        return [envelope(pdu, version, origin, state, refused=refused, second_create=second)]
    return [
        envelope(pdu, version, origin, state, refused=READMITTED),
        envelope(pdu, version, origin, readmit=True),
    ]


@contextmanager
def _opened(source: str) -> Iterator[Any]:
    try:
        import pyarrow as pa  # noqa: PLC0415  # an optional dependency
        import pyarrow.parquet as pq  # noqa: PLC0415
    except ImportError:
        raise ExtraMissing(f"{source}: Parquet", "spark") from None
    try:
        with Path(source).open("rb") as raw, pq.ParquetFile(raw) as file:
            yield file
    except OSError as error:
        raise InputError(f"{source}: {error.strerror or error}") from None
    except pa.ArrowException as error:
        raise InputError(f"{source}: {error}") from None
