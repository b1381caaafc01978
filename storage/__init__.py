"""A storage engine for the rooms of a Matrix homeserver, on Postgres."""

from storage import auth, event, federation, replication, streams, visibility
from storage.config import Config
from storage.errors import (
    AuthDenied,
    CommitUnknown,
    ConstraintViolated,
    DatabaseConflict,
    DatabaseError,
    DatabaseFull,
    DatabaseReplaced,
    DatabaseUnavailable,
    ExtraMissing,
    InputError,
    InstanceNameTaken,
    InvalidEvent,
    InvalidIdentifier,
    InvalidSignature,
    InvalidToken,
    MigrationBlocked,
    PermissionRefused,
    ProtocolError,
    PurgeRefused,
    PurgeRunning,
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
    UnknownStream,
    UnknownUser,
    WrongServerName,
)
from storage.ids import EventId, RoomId, ServerName, StateKey, UserId
from storage.persist import AppendResult
from storage.queries.context import Context
from storage.queries.event_auth import StateIds
from storage.queries.events import Aggregations, StoredEvent, ThreadSummary
from storage.queries.filters import EventFilter, SyncFilter
from storage.queries.gaps import OpenGap
from storage.queries.outbox import Outbox, Outgoing
from storage.queries.pagination.page import Gap, Page
from storage.queries.relations import RelationsPage
from storage.queries.room_info import RoomInfo
from storage.queries.sharing import SharingChanges
from storage.queries.space_children import SpaceChild
from storage.queries.sync import (
    InvitedRoom,
    JoinedRoom,
    KnockedRoom,
    LeftRoom,
    RoomSummary,
    Sync,
    Timeline,
)
from storage.store.facade import Store
from storage.store.open import open_store as open  # noqa: A004  # storage.open is the public name
from storage.version import __version__

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
    "DatabaseReplaced",
    "DatabaseUnavailable",
    "EventFilter",
    "EventId",
    "ExtraMissing",
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
    "Outbox",
    "Outgoing",
    "Page",
    "PermissionRefused",
    "ProtocolError",
    "PurgeRefused",
    "PurgeRunning",
    "RelationsPage",
    "ResyncNeeded",
    "RoomId",
    "RoomInfo",
    "RoomSummary",
    "SchemaOutOfDate",
    "SchemaTooNew",
    "ServerName",
    "SharingChanges",
    "SpaceChild",
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
    "UnknownStream",
    "UnknownUser",
    "UserId",
    "WrongServerName",
    "__version__",
    "auth",
    "event",
    "federation",
    "open",
    "replication",
    "streams",
    "visibility",
]
