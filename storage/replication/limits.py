"""Times and sizes of replication: parts of the protocol, so no settings.

Each participant, transport and connection reads `LIMITS` when it is made.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicationLimits:
    """Times and sizes of replication."""

    ping_ms: int = 5_000
    """Interval of the PINGs of a connection."""

    timeout_ms: int = 15_000
    """A side that has sent a PING and then nothing for this time counts as gone."""

    buffer_bytes_max: int = 16_777_216
    """Most unsent data for one peer; beyond it the peer is disconnected."""

    close_ms: int = 5_000
    """Longest wait, at the end of a connection, for the peer to read what was sent to it."""

    connect_timeout_ms: int = 10_000
    """Longest wait for a new connection."""

    page_rows_max: int = 1_000
    """Rows read from a table at once, where a reader has missed some."""

    batch_rows_max: int = 10_000
    """Rows under one token that a reader buffers; larger batches are read from the table."""

    names_max: int = 100
    """Worker names per connection; above it the oldest are dropped."""

    sessions_max: int = 50_000
    """Syncing users and devices per connection; above it the oldest are dropped."""

    ack_keep_ms: int = 86_400_000
    """How long an acknowledged position is kept after its connection has ended (a day)."""

    retry_ms_first: int = 100
    """Upper bound of the random pause before a lost connection is retried; it doubles each time."""

    retry_ms_max: int = 10_000
    """Largest upper bound of that pause."""


LIMITS: ReplicationLimits = ReplicationLimits()
