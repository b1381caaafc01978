"""A storage engine for the rooms of a Matrix homeserver, on Postgres."""

from storage import auth, event, replication, streams, visibility
from storage.config import Config
from storage.errors import (
    AuthDenied,
    CommitUnknown,
    ConstraintViolated,
    DatabaseConflict,
    DatabaseError,
    DatabaseFull,
    DatabaseUnavailable,
    InputError,
    InstanceNameTaken,
    InvalidEvent,
    InvalidIdentifier,
    InvalidSignature,
    InvalidToken,
    MigrationBlocked,
    PermissionRefused,
    ProtocolError,
    ResyncNeeded,
    SchemaOutOfDate,
    SchemaTooNew,
    StateUnknown,
    StorageClosed,
    StorageCorrupt,
    StorageError,
    UnknownEvent,
    UnknownRoom,
    UnknownRoomVersion,
    UnknownUser,
    WrongServerName,
)
from storage.ids import EventId, RoomId, ServerName, StateKey, UserId
from storage.opening import open_store as open  # noqa: A004  # storage.open is the public name
from storage.persist import AppendResult
from storage.queries.authorisation import StateIds
from storage.queries.context import Context
from storage.queries.events import Aggregations, StoredEvent, ThreadSummary
from storage.queries.filters import EventFilter, SyncFilter
from storage.queries.gaps import OpenGap
from storage.queries.messages import Gap, Page
from storage.queries.relations import RelationsPage
from storage.queries.sync import InvitedRoom, JoinedRoom, KnockedRoom, LeftRoom, RoomSummary, Sync, Timeline
from storage.store import Store

__all__ = [
    "Aggregations",
    "AppendResult",
    "AuthDenied",
    "CommitUnknown",
    "Config",
    "ConstraintViolated",
    "Context",
    "DatabaseConflict",
    "DatabaseError",
    "DatabaseFull",
    "DatabaseUnavailable",
    "EventFilter",
    "EventId",
    "Gap",
    "InputError",
    "InstanceNameTaken",
    "InvalidEvent",
    "InvalidIdentifier",
    "InvalidSignature",
    "InvalidToken",
    "InvitedRoom",
    "JoinedRoom",
    "KnockedRoom",
    "LeftRoom",
    "MigrationBlocked",
    "OpenGap",
    "Page",
    "PermissionRefused",
    "ProtocolError",
    "RelationsPage",
    "ResyncNeeded",
    "RoomId",
    "RoomSummary",
    "SchemaOutOfDate",
    "SchemaTooNew",
    "ServerName",
    "StateIds",
    "StateKey",
    "StateUnknown",
    "StorageClosed",
    "StorageCorrupt",
    "StorageError",
    "Store",
    "StoredEvent",
    "Sync",
    "SyncFilter",
    "ThreadSummary",
    "Timeline",
    "UnknownEvent",
    "UnknownRoom",
    "UnknownRoomVersion",
    "UnknownUser",
    "UserId",
    "WrongServerName",
    "auth",
    "event",
    "open",
    "replication",
    "streams",
    "visibility",
]
