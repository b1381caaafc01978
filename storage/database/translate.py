"""The error table: from the driver's errors to ours.

Two tables decide, the name of the constraint first, the SQLSTATE second (whole code, then its class
of two characters). A test compares each constraint of the catalogue with this file. It is either in
CONFLICTS (another writer did the same at the same time; a retry is right) or in INVARIANTS (only a
defect of our own code can violate it), with the reason.

Some errors come from the driver without a request to Postgres: a value that does not fit a
parameter, or a misuse of the interface. They are our own mistakes and become `DatabaseError`.
"""

import asyncio
from collections.abc import Mapping
from typing import Any, Final

import asyncpg

from storage.database.dsn import DsnServer
from storage.database.session import POOLING, UNSUPPORTED
from storage.errors import (
    ConstraintViolated,
    DatabaseConflict,
    DatabaseError,
    DatabaseFull,
    DatabaseUnavailable,
    InputError,
    InstanceNameTaken,
    PermissionRefused,
    StorageClosed,
    StorageError,
)

DRIVER_ERRORS: Final = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
    asyncio.TimeoutError,
)
"""All errors that the driver raises: from the server, from itself, and from the socket."""

CONNECTING_ERRORS: Final = (*DRIVER_ERRORS, ValueError, OverflowError)
"""All errors while a connection is opened; the last two are of a value in the DSN."""

LOST_STATEMENT: Final = ("26000", "42P05")
"""SQLSTATE of a prepared statement that is unknown, or known already.

Each session numbers its own, so a pooler has sent it to another process.
"""

STALE_PLAN: Final = "RS001"
"""SQLSTATE of `refuse_stale_plan` (schema.sql): rows have changed since a write was planned."""

OLD_WRITER: Final = "RS002"
"""SQLSTATE of `refuse_old_writer` (schema.sql): another process took over this one's name."""

TOO_MANY_MOVES: Final = "RS004"
"""SQLSTATE of `reordered_across` (schema.sql): a pagination token is too old to be read.

`storage.queries.pagination.page` turns it into `InvalidToken`.
"""

READ_ONLY: Final = "25006"
"""SQLSTATE of a write in a read-only transaction: on a standby, or in a read-only session."""

DATA_EXCEPTION: Final = "22"
"""Class of the SQLSTATEs of a value that does not fit."""

SEQUENCE_ENDED: Final = "2200H"

INVALID_LOGIN: Final = "28P01"
OF_PGBOUNCER: Final = "SASL authentication failed"
"""PgBouncer's message for a wrong password, with the SQLSTATE of a broken protocol."""

NO_PRIVILEGE: Final = "42501"
PRIVILEGE_NEEDED: Final = (
    "{} lacks this privilege: use the role for this work, "
    "or run `room-storage migrate --grants` as the owner of the tables"
)

OF_SCHEMA: Final = "permission denied for schema"
OWNER_NEEDED: Final = (
    "{} may not create tables there: migrate as the owner of the database, "
    "or ALTER DATABASE … OWNER TO the owner of the tables"
)

SQLSTATES: Final[Mapping[str, type[DatabaseError]]] = {
    # A retry of the same work may succeed.
    "40001": DatabaseConflict,  # serialization_failure
    "40P01": DatabaseConflict,  # deadlock_detected
    "55P03": DatabaseConflict,  # lock_not_available, lock_timeout too
    STALE_PLAN: DatabaseConflict,
    OLD_WRITER: InstanceNameTaken,
    # No server answers, or it refuses this client, or refuses now.
    "08": DatabaseUnavailable,  # connection_exception
    "28": DatabaseUnavailable,  # invalid_authorization_specification
    "3D000": DatabaseUnavailable,  # invalid_catalog_name: no such database
    "53300": DatabaseUnavailable,  # too_many_connections
    "57014": DatabaseUnavailable,  # query_canceled, statement_timeout too
    "57P01": DatabaseUnavailable,  # admin_shutdown
    "57P02": DatabaseUnavailable,  # crash_shutdown
    "57P03": DatabaseUnavailable,  # cannot_connect_now: starting up or shutting down
    "57P05": DatabaseUnavailable,  # idle_session_timeout
    "25P03": DatabaseUnavailable,  # idle_in_transaction_session_timeout
    READ_ONLY: DatabaseUnavailable,  # a standby, or one that was a primary
    # A resource is exhausted.
    "53": DatabaseFull,  # insufficient_resources: 53100 disk_full, 53200 out_of_memory
    "54000": DatabaseFull,  # program_limit_exceeded
    "58030": DatabaseFull,  # io_error
    # The role lacks a privilege.
    NO_PRIVILEGE: PermissionRefused,
    # The data would break a rule of the schema.
    "23": ConstraintViolated,  # integrity_constraint_violation
}
"""SQLSTATE, or its first two characters, to the error it becomes.

All others become `DatabaseError`.
"""

CONFLICTS: Final[Mapping[str, str]] = {
    "principals_name_key": "two writers intern the same user or server",
    "event_types_type_key": "two writers intern the same event type",
    "state_keys_type_nid_state_key_key": "two writers intern the same state key",
    "rooms_room_id_key": "two writers meet the same new room",
    "import_events_pkey": "a task of an import is repeated while its first attempt still writes",
    "events_chosen_id_key": "two writers store the same event",
    "local_transactions_pkey": "two writers store the same request of a client",
    "missing_events_event_id_key": "two writers name the same missing parent",
    "background_jobs_pkey": "two migrations register the same job",
    "deployment_pkey": "two processes open a new database",
    "stream_positions_pkey": "two processes start under one instance name",
    "writers_instance_name_key": "two processes start under one new instance name",
    "account_data_pkey": "two requests set the same account data",
    "receipts_pkey": "two requests set the same receipt",
    "gap_failures_event_nid_fkey": "the missing event arrives while a failure to get it is written",
}
"""Constraints that fail where two writers collide: `DatabaseConflict`.

The second attempt reads what the other wrote.
"""

VERIFY: Final = (
    "a stored row may be wrong: run `room-storage verify --repair`. If it finds nothing, report "
    "this as a defect"
)

INVARIANTS: Final[Mapping[str, str]] = {
    # Numbers come from sequences, and no row is written under an old one.
    "purge_jobs_pkey": "purge_job_ids is a sequence",
    "archive_packs_pkey": "archive_pack_numbers is a sequence",
    "archive_packs_state_check": "the states are constants of one package",
    "archive_garbage_pkey": "written by INSERT … ON CONFLICT DO NOTHING",
    "purge_retained_events_pkey": "written by INSERT … ON CONFLICT",
    "dictionaries_pkey": "written by INSERT … ON CONFLICT",
    "purge_jobs_cut_check": "both come from one cut",
    "purge_jobs_finished_check": "both are set by one statement",
    "principals_pkey": "principal_nids is a sequence",
    "erased_users_pkey": "a second erasure changes nothing: ON CONFLICT DO NOTHING",
    "event_types_pkey": "type_nids is a sequence",
    "state_keys_pkey": "state_key_nids is a sequence",
    "published_facts_pkey": "published_facts_stream is a sequence",
    "defined_streams_pkey": "a second definition changes nothing: ON CONFLICT DO NOTHING",
    "cursors_pkey": "written by INSERT … ON CONFLICT",
    "sliding_connections_pkey": "sliding_connection_nids is a sequence",
    "sliding_connections_conn_id_key": "written by INSERT … ON CONFLICT",
    "sliding_rooms_pkey": "a state of a connection is written once, under the connection's lock",
    "cursors_position_check": "a position is checked before it is sent",
    "purged_streams_pkey": "each purge sets it: ON CONFLICT DO UPDATE",
    "partial_rooms_pkey": "written by INSERT … ON CONFLICT DO NOTHING",
    "rooms_pkey": "room_nids is a sequence",
    "events_pkey": "event_nids is a sequence; an event takes the number of its missing_events row, "
    "which is deleted",
    "events_stream_ordering_key": "events_stream is a sequence",
    "missing_events_pkey": "event_nids is a sequence",
    "gap_failures_pkey": "written by INSERT … ON CONFLICT",
    "state_groups_pkey": "state_group_nids is a sequence",
    "local_transactions_event_nid_key": "event_nids is a sequence, and an event is stored once",
    "auth_chains_position_key": "one write counts within a chain, and its number is that of an "
    "event, or of a sequence",
    # One write at a time per room (rooms.write_version), which knows the stored rows.
    "dropped_extremities_pkey": "an extremity is dropped once, "
    "in a write that compares rooms.write_version",
    "waiting_redactions_pkey": "a redaction waits once, in the write that stores it",
    "reordered_events_pkey": "a write moves an event once, "
    "and rooms.moves grows with each under the room's write_version",
    "current_state_pkey": "a plan under the room's write_version knows which rows are new; "
    "the others are written by INSERT … ON CONFLICT",
    "state_deltas_pkey": "a position changes each key once",
    "memberships_pkey": "written by INSERT … ON CONFLICT",
    "auth_chains_pkey": "an event gets its position in the write that stores it",
    "auth_chain_links_pkey": "links are written with the position they start from",
    "visibility_pkey": "a plan under the room's write_version knows which rows are new; "
    "the others are written by INSERT … ON CONFLICT",
    "past_visibility_pkey": "written by INSERT … ON CONFLICT under the room's write_version",
    "out_of_band_memberships_pkey": "written by INSERT … ON CONFLICT "
    "under the room's write_version",
    "outlier_memberships_pkey": "events_stream is a sequence",
    "writers_pkey": "writer_nids is a sequence",
    "account_data_stream_id_key": "account_data_stream is a sequence",
    "to_device_pkey": "to_device_stream is a sequence",
    "receipts_stream_id_key": "receipts_stream is a sequence",
    "cache_invalidations_pkey": "caches_stream is a sequence",
    "audiences_pkey": "numbers are assigned under the room's write_version",
    # Rules within one row; computed in one place each.
    "deployment_singleton_check": "the column is never given",
    "lost_positions_pkey": "a gap ends at the new value of the sequence, "
    "under the lock of the entering process",
    "lost_positions_check": "the sequence is at or past all positions of its streams, "
    "and is set higher",
    "lost_positions_writers_check": "both arrays come from the same rows",
    "schema_compatibility_pkey": "the row is made with the table, and only updated",
    "schema_compatibility_singleton_check": "the column is never given",
    "background_jobs_batch_check": "a batch has at least one row (storage/database/background.py)",
    "state_keys_type_nid_fkey": "types are interned before state keys, and neither is ever removed",
}
"""Constraints that only a defect of this engine can violate, with their guarantees.

They become `ConstraintViolated`.
"""


def translate(
    error: BaseException, *, closed: bool = False, role: str = ""
) -> DatabaseError | InputError | StorageClosed:
    """Return our error for the driver's `error`; raise it `from error`.

    `closed`: the connection is gone afterwards, so any error means that it is unavailable. `role`:
    the role of the session, for the message of `PermissionRefused`.
    """
    if isinstance(error, asyncpg.PostgresError):
        return _of_server(error, role=role)
    if isinstance(error, OSError | TimeoutError | asyncio.TimeoutError):
        return DatabaseUnavailable(str(error) or "no answer within the time limit")
    if closed:
        return DatabaseUnavailable(str(error))
    return DatabaseError(str(error))


def refused_row(error: Exception) -> str | None:
    """Return the constraint, or the SQLSTATE of a value, for which Postgres refuses a row.

    Return None for any other error. A sequence that has ended refuses every row.
    """
    if isinstance(error, ConstraintViolated):
        return error.constraint or f"SQLSTATE {error.sqlstate}"
    sqlstate = error.sqlstate or "" if isinstance(error, DatabaseError) else ""
    is_value = sqlstate.startswith(DATA_EXCEPTION) and sqlstate != SEQUENCE_ENDED
    return f"SQLSTATE {sqlstate}" if is_value else None


def is_refused_write(error: StorageError) -> bool:
    """Return whether Postgres has refused to write in a session that may only read."""
    return isinstance(error, DatabaseError) and error.sqlstate == READ_ONLY


def translate_connecting(
    error: BaseException, server: DsnServer, *, role: str = ""
) -> DatabaseError | InputError | StorageClosed:
    """Return our error for a connection that could not be opened; raise it `from error`.

    It names the place or the file, and never the password. `role` is as in `translate`.
    """
    is_of_pooler = isinstance(error, asyncpg.ProtocolViolationError) and UNSUPPORTED in str(error)
    if isinstance(error, asyncpg.UndefinedObjectError) or is_of_pooler:
        # Postgres or PgBouncer gets what the driver ignores
        return InputError(f"the DSN for {server.address} has an unknown option: {error.args[0]}")
    if isinstance(error, asyncpg.PostgresError):
        return _of_server(
            error, f"Postgres at {server.address} refuses: ", server=server, role=role
        )
    of_dsn = isinstance(error, asyncpg.ClientConfigurationError | ValueError | OverflowError)
    if of_dsn and not isinstance(error, OSError):  # an error of TLS is both
        return InputError(f"the DSN for {server.address} cannot be used: {server.reason(error)}")
    if isinstance(error, TimeoutError) and str(error) and not error.errno:  # the pool was in use
        return DatabaseUnavailable(str(error))
    return DatabaseUnavailable(
        f"cannot connect to Postgres at {server.address}: {server.reason(error)}"
    )


def role_of(driver: Any) -> str:
    """Return the role of a session, as Postgres reported it at the start; "" if it is not known."""
    if driver.is_closed():
        return ""
    return str(getattr(driver.get_settings(), "session_authorization", ""))


def _of_server(
    error: Any, prefix: str = "", *, server: DsnServer | None = None, role: str = ""
) -> DatabaseError:
    """Return our error for one that Postgres sent: its message, with the detail if there is one."""
    sqlstate: str = error.sqlstate or ""
    constraint: str = error.constraint_name or ""
    message = str(error.args[0]).rstrip()
    detail = (error.detail or "").rstrip(".")  # more may follow
    reason = prefix + (f"{message}: {detail}" if detail else message)
    if sqlstate in LOST_STATEMENT:
        reason += f"; {POOLING}"
    if server is not None and (sqlstate == INVALID_LOGIN or OF_PGBOUNCER in message):
        reason += f"; {server.password_source()}"
    if sqlstate == NO_PRIVILEGE:
        needed = OWNER_NEEDED if message.startswith(OF_SCHEMA) else PRIVILEGE_NEEDED
        reason += f"; {needed.format(f'the role {role}' if role else 'the role')}"
    if constraint in CONFLICTS:
        return DatabaseConflict(f"{reason}; {CONFLICTS[constraint]}", sqlstate=sqlstate)
    kind = SQLSTATES.get(sqlstate) or SQLSTATES.get(sqlstate[:2], DatabaseError)
    if issubclass(kind, ConstraintViolated):
        cure = f"; {VERIFY}" if constraint in INVARIANTS else ""
        return kind(reason + cure, constraint=constraint, sqlstate=sqlstate)
    return kind(reason, sqlstate=sqlstate)
