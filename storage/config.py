"""Every limit of the engine, in one frozen value.

All limits are here: modules take the `Config` they are given and read no environment themselves.
Units stand last in the name (`_ms`, `_bytes`, `_mb`); a field without a unit is a count.
"""

import difflib
import functools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Final, NamedTuple, Self, get_type_hints

from storage.errors import InputError

logger: logging.Logger = logging.getLogger(__name__)

ENVIRONMENT_PREFIX = "STORAGE_"
OTHER_VARIABLES: Final[frozenset[str]] = frozenset(
    {
        "STORAGE_DSN",  # these four: storage/database/dsn.py
        "STORAGE_DSN_FILE",
        "STORAGE_SYNAPSE_DSN",
        "STORAGE_SYNAPSE_DSN_FILE",
        "STORAGE_ARCHIVE_URL",  # storage/cli/archive.py
        "STORAGE_DATA_DIR",
        "STORAGE_LOG_FORMAT",  # these and the next: storage/cli
        "STORAGE_LOG_LEVEL",
        "STORAGE_REDIS",
        "STORAGE_ROLE_PREFIX",
        "STORAGE_SERVER_NAME",
    }
)
"""Variables that are no field of `Config`."""

OF_OTHERS: Final[re.Pattern[str]] = re.compile(
    r"STORAGE_(TEST|BENCH|PLAN)_\w+"  # of tests and benchmarks, as the next
    r"|STORAGE_(DAMAGES|EXAMPLES|FUZZ|SEED|VECTORS|ROOMS|LARGE_ROOM|OUTAGE_S)"
    # Kubernetes sets these for a service with the name "storage"
    r"|STORAGE_SERVICE_(HOST|PORT\w*)|STORAGE_PORT(_\d+\w*)?"
)
"""Variables with our prefix that the package does not read, and that are no mistakes."""

REMOVED_VARIABLES: Final[Mapping[str, re.Pattern[str]]] = {
    "since 0.3.0 it is a part of STORAGE_CACHE_MB": re.compile(
        r"STORAGE_(CACHE_\w+|NOTIFIER_KEYS)_MAX"
    ),
    "since 0.3.0 its value is fixed": re.compile(
        r"STORAGE_(REPLICATION_\w+_(MS|MAX|BYTES|FIRST)"
        r"|(RETRY_DELAY|GAP_RETRY)_MS_(FIRST|MAX)|TRANSACTION_ATTEMPTS|STATEMENT_CACHE_SIZE"
        r"|PURGE_(BATCH_MAX|HOLD_MS))"
    ),
}
"""Variables of earlier releases, by the advice of the warning."""

BOOLEANS: Final[Mapping[str, bool]] = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
NAME_MAX: Final = 40  # characters
COMMITS: Final = ("remote_apply", "on", "remote_write", "local", "off")  # of synchronous_commit
COUNT_MAX: Final = 1_000_000_000  # fits an int of Postgres
WAIT_MS_MAX: Final = 2_000_000_000  # 23 days; a timeout of Postgres is below 2^31
LONGEST_MS: Final = 10**15  # lifetimes of events: 31,000 years


class AllowedRange(NamedTuple):
    """The allowed range of a whole number, both ends included."""

    least: int
    most: int


Most = Annotated[int, AllowedRange(1, COUNT_MAX)]
"""A limit; with 0 nothing would ever be done."""

Wait = Annotated[int, AllowedRange(1, WAIT_MS_MAX)]
"""A timeout or an interval."""

Pause = Annotated[int, AllowedRange(0, WAIT_MS_MAX)]
"""A time that may be 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Limits and sizes; the defaults suit a small machine (2 cores, 4 GB).

    `Config.from_env()` reads `STORAGE_<FIELD IN CAPITALS>` for each field, for instance
    `STORAGE_POOL_SIZE_MAX=20`. Raise `InputError` for a value of another type or out of its range,
    with the field and the range.
    """

    instance_name: str = "main"
    """The name of this process among those on the database; `storage.open` sets it.

    Sessions carry it, so that others see which processes are live.
    """

    # ---------------------------------------------------------------------------------------------
    # database

    pool_size_min: Annotated[int, AllowedRange(0, 10_000)] = 1
    """Connections opened at start and kept open; `pool_size_max` of them where that is smaller."""

    pool_size_max: Annotated[int, AllowedRange(1, 10_000)] = 10
    """Most connections; a caller waits for `pool_acquire_timeout_ms` if none is free."""

    pool_acquire_timeout_ms: Wait = 30_000
    """Longest wait for a free connection before `DatabaseUnavailable`.

    It also applies where Postgres accepts no more sessions, and to repeats by `Database.run`.
    """

    database_schema: str = "public"
    """The schema of the tables: `search_path` of every session, whatever the server sets."""

    synchronous_commit: str = "on"
    """The setting `synchronous_commit` of every session, whatever the server sets.

    It is `remote_apply`, `on`, `remote_write`, `local` or `off`. With `off` a crash of the server
    loses events that were stored, synced and replicated.
    """

    connect_timeout_ms: Wait = 10_000
    """Longest wait for Postgres to answer a new connection."""

    statement_timeout_ms: Wait = 60_000
    """Longest run of one statement before it is cancelled (`DatabaseUnavailable`).

    Long maintenance opens a `Database` with a larger one.
    """

    archive_timeout_ms: Wait = 10_000
    """Longest wait for the files of the archive before `ArchiveUnavailable`."""

    lock_timeout_ms: Wait = 10_000
    """Longest wait for a row, table or advisory lock before the transaction is repeated."""

    prepare_ahead: bool = True
    """Whether each connection of a store prepares the usual statements before their first use.

    That takes about 0.1 s of processor time of Postgres per connection. Without it, the first page
    or sync of a connection takes longer.
    """

    # ---------------------------------------------------------------------------------------------
    # writer

    writer_batch_max: Most = 1_000
    """Most events in one write, unless a single append has more."""

    follow_ms: Wait = 250
    """Interval between two polls of stream_positions.

    The poll reads the positions of other writers, and moves those of idle ones.
    """

    enter_wait_ms: Pause = 5_000
    """Longest wait of an opening store for the sessions of an earlier process under its name.

    After it `InstanceNameTaken` is raised.
    """

    writer_queue_max: Most = 10_000
    """Appends that may wait for the writer; further ones wait before they are queued."""

    forward_extremities_max: Annotated[int, AllowedRange(1, 1_000)] = 20
    """Most forward extremities of a room.

    Above it, those are dropped whose state the others supersede
    (storage/persist/plan/topology.py). An event may have 20 parents, so the next event that
    the homeserver sends can name them all.
    """

    # ---------------------------------------------------------------------------------------------
    # caches

    cache_reads: bool = False
    """Read `event`, `events`, `current_state` and `rooms_of` from memory where they are cached.

    Commits of another process are then visible when they are published here: by replication, or
    after `follow_ms`.
    """

    cache_mb: Annotated[int, AllowedRange(0, 1 << 20)] = 900
    """Memory for the caches of a process when all of them are full; 0 disables them.

    It has fixed shares (storage/cache_sizes.py), and each cache drops what was used least recently.
    The default is enough for almost forty rooms of 50,000 members. The limits apply between
    batches. Within one, a state costs 1.5 to 1.9 kB on top of the one it is derived from (2 MB for
    1,000 joins of a room of 50,000), and up to 200 bytes an entry for each room whose state has to
    be read first. `cache_reads` caches as many events again, and current states.
    """

    # ---------------------------------------------------------------------------------------------
    # reads

    page_limit_max: Most = 10_000
    """Most events in one page, timeline or federation response; a larger limit is reduced to it."""

    traversal_rows_max: Most = 20_000
    """Most events that one walk over the event graph reads, or one sync in a room.

    The events found until then are the result. It is also the limit of moves read for the position
    of a pagination token; a token with more raises `InvalidToken`.
    """

    replica_wait_ms: Wait = 500
    """Longest wait of a read for a standby that has not replayed what the read needs.

    After it the primary answers, or a store with ``read_only`` raises `ReplicaBehind`. It should be
    longer than `follow_ms`.
    """

    # ---------------------------------------------------------------------------------------------
    # maintenance

    censor_after_ms: Annotated[int, AllowedRange(-LONGEST_MS, LONGEST_MS)] = 604_800_000
    """Age of a redaction at which `room-storage censor` deletes the redacted content: seven days.

    The age counts from the arrival of the redaction. Negative: the content stays forever, unless
    the command sets the age.
    """

    transaction_keep_ms: Annotated[int, AllowedRange(0, LONGEST_MS)] = 604_800_000
    """How long a repeated request returns the event of the first one (`Store.send`): seven days.

    `room-storage gc` deletes older transaction ids; until then they count.
    """

    sliding_connection_keep_ms: Annotated[int, AllowedRange(3_600_000, LONGEST_MS)] = 604_800_000
    """How long an unused connection of sliding sync stays: seven days.

    `room-storage gc` deletes older ones. Their clients get `UnknownPos`, and begin a new one.
    """

    sliding_connections_max: Annotated[int, AllowedRange(1, 10_000)] = 16
    """Most connections of sliding sync that a device has; a new one replaces the oldest."""

    # ---------------------------------------------------------------------------------------------
    # purges

    purge_pause_ms: Pause = 150
    """Pause of a purge between two transactions, and of `room-storage gc`."""

    retention_lifetime_ms_default: Annotated[int, AllowedRange(0, LONGEST_MS)] = 0
    """Lifetime of history in rooms without m.room.retention, for `room-storage purge --retention`.

    0: forever.
    """

    retention_lifetime_ms_min: Annotated[int, AllowedRange(0, LONGEST_MS)] = 86_400_000
    """Smallest lifetime for a room's m.room.retention (a day); a smaller one is raised to it."""

    retention_lifetime_ms_max: Annotated[int, AllowedRange(0, LONGEST_MS)] = 0
    """Largest such lifetime; a larger one is reduced to it. 0: no limit."""

    # ---------------------------------------------------------------------------------------------
    # embedded Postgres

    embedded_start_timeout_ms: Wait = 60_000
    """Longest wait for the embedded Postgres to come up, crash recovery included."""

    embedded_shared_buffers_mb: Annotated[int, AllowedRange(1, 1 << 20)] = 256
    """Page cache of the embedded Postgres."""

    embedded_connections_max: Annotated[int, AllowedRange(5, 10_000)] = 100
    """Connections the embedded Postgres accepts, from all processes that share it."""

    embedded_fsync: bool = True
    """Whether a commit of the embedded Postgres survives a power failure. Off only for tests."""

    def __post_init__(self) -> None:
        for name, (kind, allowed) in ALLOWED.items():
            _check(name, getattr(self, name), kind, allowed)
        if self.synchronous_commit not in COMMITS:
            raise InputError(
                f"{_shown('synchronous_commit')} is {self.synchronous_commit!r}: "
                f"it must be one of {', '.join(COMMITS)}"
            )
        if 0 < (longest := self.retention_lifetime_ms_max) < self.retention_lifetime_ms_min:
            least = self.retention_lifetime_ms_min
            bounds = f"0, or at least retention_lifetime_ms_min, which is {least}"
            raise InputError(
                f"{_shown('retention_lifetime_ms_max')} is {longest}: it must be {bounds}"
            )

    @classmethod
    def from_env(cls, environ: Mapping[str, str] = os.environ) -> Self:
        """Return the defaults, changed by the environment.

        Raise `InputError` with the name of a variable whose value is wrong. Log a warning, once in
        a process, for a variable that nothing reads.
        """
        values: dict[str, object] = {}
        for field in fields(cls):
            text = environ.get(_variable(field.name))
            if text is not None:
                values[field.name] = _parse(field.name, text)
        for name in unknown_variables(environ):
            _warn_of(name)
        return cls(**values)  # type: ignore[arg-type]  # _parse gives the type of the field


ALLOWED: Final[Mapping[str, tuple[type, AllowedRange | None]]] = {
    name: (hint.__origin__, hint.__metadata__[0]) if hasattr(hint, "__metadata__") else (hint, None)
    for name, hint in get_type_hints(Config, include_extras=True).items()
}
"""The type of each field, and the range of a number."""


def _check(name: str, value: object, kind: type, allowed: AllowedRange | None) -> None:
    """Raise `InputError` unless the value is of the kind, and within the range."""
    if allowed is not None:
        if type(value) is not int or not allowed.least <= value <= allowed.most:
            raise InputError(
                f"{_shown(name)} is {value!r}: "
                f"it must be a whole number from {allowed.least} to {allowed.most}"
            )
    elif kind is bool:
        if type(value) is not bool:
            raise InputError(f"{_shown(name)} is {value!r}: it must be true or false")
    elif (
        not isinstance(value, str)
        or not value.strip()
        or len(value) > NAME_MAX
        or not (value.isascii() and value.isprintable())
    ):
        raise InputError(
            f"{_shown(name)} is {value!r}: it must be 1 to {NAME_MAX} printable ASCII characters"
        )


def _variable(name: str) -> str:
    """Return the environment variable of a field."""
    return ENVIRONMENT_PREFIX + name.upper()


def _shown(name: str) -> str:
    """Return the field and its environment variable."""
    return f"{name} ({_variable(name)})"


def _parse(name: str, text: str) -> object:
    """Return `text` in the type of the field; where it has none, the text, which is then refused.

    So `_check` has the one sentence for a wrong value.
    """
    kind, _ = ALLOWED[name]
    if kind is bool:
        return BOOLEANS.get(text.strip().lower(), text)
    if kind is int:
        try:
            return int(text)
        except ValueError:  # also of more digits than Python reads
            return text
    return text


def unknown_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Return the variables with our prefix that nothing reads: a misspelt one has no effect."""
    variables = _variables()
    return sorted(
        name
        for name in environ
        if name.startswith(ENVIRONMENT_PREFIX)
        and name not in variables
        and not OF_OTHERS.fullmatch(name)
    )


@functools.cache  # once for each name
def _warn_of(name: str) -> None:
    logger.warning(
        "the environment variable %s is not known, and has no effect%s", name, _advice(name)
    )


def _advice(name: str) -> str:
    for advice, names in REMOVED_VARIABLES.items():
        if names.fullmatch(name):
            return f": {advice}"
    # the prefix alone would make all names similar
    variables = {variable.removeprefix(ENVIRONMENT_PREFIX): variable for variable in _variables()}
    near = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), variables, n=1)
    return f": did you mean {variables[near[0]]}?" if near else ""


def _variables() -> frozenset[str]:
    return OTHER_VARIABLES | {_variable(field.name) for field in fields(Config)}
