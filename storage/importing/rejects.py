"""The file of lines that were not stored: NDJSON that can be inspected and imported again.

Each line is one object:

  {"file": "room.ndjson", "line": 12, "outcome": "missing_parents", "event_id": "$…",
   "reason": "…", "missing": ["$…"], "text": "…"}

``text`` is the line unchanged; if it is not UTF-8, there is ``base64`` instead. Lines that could be
imported later: `jq -r 'select(.outcome == "missing_parents") | .text'`.
"""

import base64
from dataclasses import dataclass
from typing import IO, Any, Literal, Self

import orjson

RejectOutcome = Literal["bad_line", "invalid", "missing_parents"]
TEXT_BYTES_MAX = 1 << 20
"""The number of bytes kept of a longer line."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Why one line was not stored."""

    outcome: RejectOutcome
    reason: str
    event_id: str | None = None
    missing: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """Return the bytes for `RetryLine.note`."""
        return orjson.dumps(self)

    @classmethod
    def decode(cls, note: bytes) -> Self:
        """Return the reject from `encode`."""
        fields: dict[str, Any] = orjson.loads(note)
        return cls(
            fields["outcome"], fields["reason"], fields["event_id"], tuple(fields["missing"])
        )


class Rejects:
    """Counts rejects, and writes them if there is a file."""

    def __init__(self, target: IO[bytes] | None) -> None:
        self._target = target
        self.count: int = 0

    def write(self, source: str, number: int, raw: bytes, reject: Reject) -> None:
        """Write one line that was not stored."""
        self.count += 1
        if self._target is None:
            return
        fields: dict[str, object] = {
            "file": source,
            "line": number,
            "outcome": reject.outcome,
            "event_id": reject.event_id,
        }
        fields["reason"] = reject.reason
        if reject.missing:
            fields["missing"] = reject.missing
        self._target.write(orjson.dumps(fields | _shown(raw)) + b"\n")


def _shown(raw: bytes) -> dict[str, str]:
    kept = raw.rstrip(b"\r")[:TEXT_BYTES_MAX]
    try:
        return {"text": kept.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(kept).decode()}
