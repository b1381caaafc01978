"""The file of what was not stored: NDJSON, one object a line, so that it can be looked through and imported again.

    {"file": "room.ndjson", "line": 12, "outcome": "missing_parents", "event_id": "$…", "reason": "…", "missing": ["$…"], "text": "…"}

``text`` is the line as it stands; where it is not UTF-8 there is ``base64`` instead. What could be imported one day:
`jq -r 'select(.outcome == "missing_parents") | .text'`.
"""

import base64
from dataclasses import dataclass
from typing import IO, Any, Literal, Self

import orjson

RejectOutcome = Literal["bad_line", "invalid", "missing_parents"]
TEXT_BYTES_MAX = 1 << 20
"""What is kept of a longer line."""


@dataclass(frozen=True, slots=True)
class Reject:
    """Why one line was not stored."""

    outcome: RejectOutcome
    reason: str
    event_id: str | None = None
    missing: tuple[str, ...] = ()

    def encode(self) -> bytes:
        """As bytes, for `RetryLine.note`."""
        return orjson.dumps(self)

    @classmethod
    def decode(cls, note: bytes) -> Self:
        """From `encode`."""
        fields: dict[str, Any] = orjson.loads(note)
        return cls(
            fields["outcome"], fields["reason"], fields["event_id"], tuple(fields["missing"])
        )


class Rejects:
    """Where rejects go: counted always, written if there is a file."""

    def __init__(self, target: IO[bytes] | None) -> None:
        self._target = target
        self.count = 0

    def write(self, source: str, number: int, raw: bytes, reject: Reject) -> None:
        """One line that was not stored."""
        self.count += 1
        if self._target is None:
            return
        said: dict[str, object] = {
            "file": source,
            "line": number,
            "outcome": reject.outcome,
            "event_id": reject.event_id,
        }
        said["reason"] = reject.reason
        if reject.missing:
            said["missing"] = reject.missing
        self._target.write(orjson.dumps(said | _shown(raw)) + b"\n")


def _shown(raw: bytes) -> dict[str, str]:
    kept = raw.rstrip(b"\r")[:TEXT_BYTES_MAX]
    try:
        return {"text": kept.decode()}
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(kept).decode()}
