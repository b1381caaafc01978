"""Every error that this package raises, as one tree.

StorageError
├─ InputError                 the caller gave a wrong value; the store is unchanged
│  ├─ InvalidEvent            malformed, oversized, a bad number
│  ├─ InvalidSignature        a signature is missing, or does not fit
│  ├─ AuthDenied              an authorisation rule refuses the event
│  ├─ UnknownRoomVersion
│  ├─ InvalidIdentifier       an id does not have the form of one
│  ├─ UnknownRoom
│  ├─ UnknownEvent
│  ├─ UnknownUser
│  ├─ UnknownStream           the process has not defined the stream
│  ├─ StateUnknown            the event is stored, the state at it is not
│  ├─ WrongServerName         the database belongs to another homeserver
│  ├─ ExtraMissing            a feature needs packages of an extra that is not installed
│  ├─ ArchiveRunning          another process works on the archive
│  ├─ ArchiveNotOwned         the archive belongs to another database
│  ├─ PurgeRefused            the purge is impossible, or not now
│  │  └─ PurgeRunning         another purge of the room is running
│  ├─ InvalidToken            a sync or page token cannot be used
│  ├─ PartialState            members of the room are not known yet; repeat later
│  ├─ UnknownPos              the connection of a sliding sync has expired
│  └─ ResyncNeeded            the reader is too far behind; start again
├─ ProtocolError              a replication line is malformed
├─ DatabaseError              Postgres refused or failed; translated
│  ├─ DatabaseUnavailable     cannot connect, or the connection was lost
│  │  └─ DatabaseReplaced     restored, or a standby took over: the store enters it again
│  ├─ ReplicaBehind           the standby has not replayed a token in time
│  ├─ DatabaseFull            out of disk or other resources
│  ├─ DatabaseConflict        serialization failure, deadlock or lock timeout, after bounded retries
│  ├─ CommitUnknown           the connection was lost during COMMIT
│  ├─ InstanceNameTaken       another process writes under the same name
│  ├─ PermissionRefused       the role lacks a privilege
│  └─ ConstraintViolated      a constraint of the schema refused a row
├─ ArchiveUnavailable         the archive of old events cannot be reached, or is full; repeat later
├─ SchemaOutOfDate            the database has an older schema than this package can serve
├─ SchemaTooNew               the database has a newer schema than this package can serve
├─ MigrationBlocked           a step of a migration has to wait for something
├─ ReadOnly                   the store was opened to read
├─ StorageClosed              the store was closed
└─ StorageCorrupt             an invariant of the store is broken

Each class states the next step for the caller. Instances carry the ids that are involved as
attributes, and can be pickled, so that they cross process borders unchanged.
"""

# ruff: noqa: N818 - a name says what happened; the tree shows that it is an error.

from typing import Literal, Self

InvalidKind = Literal["malformed", "number", "too_large"]


class StorageError(Exception):
    """The root: catch this to catch everything the package raises on purpose."""

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle without calling __init__, whose arguments are keywords."""
        return _rebuild, (type(self), self.args, self.__dict__)


def _rebuild(
    cls: type[StorageError], args: tuple[object, ...], attributes: dict[str, object]
) -> StorageError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


def _named(event_id: str | None) -> str:
    """Return the beginning of a message about an event, which may have no id yet."""
    return f"{event_id}: " if event_id else ""


class InputError(StorageError):
    """The caller gave a wrong value. Do not repeat the call with the same input."""


class InvalidEvent(InputError):
    """The event is malformed: drop it, because no conforming server accepts it.

    `kind` is "number" for one that canonical JSON does not allow, "too_large" for an event or a key
    above the limits, else "malformed". `key` is the path of the key, such as "content.x.0".
    """

    def __init__(
        self,
        reason: str,
        *,
        event_id: str | None = None,
        kind: InvalidKind = "malformed",
        key: str | None = None,
    ) -> None:
        super().__init__(f"{_named(event_id)}{reason}")
        self.reason = reason
        self.event_id = event_id
        self.kind = kind
        self.key = key

    def of(self, event_id: str | None) -> Self:
        """Return the same error, naming the event."""
        return type(self)(self.reason, event_id=event_id, kind=self.kind, key=self.key)


class InvalidSignature(InputError):
    """A signature is missing or wrong: try another key of that server, else drop the event."""

    def __init__(
        self,
        reason: str,
        *,
        event_id: str | None = None,
        server_name: str | None = None,
        key_id: str | None = None,
    ) -> None:
        super().__init__(
            f"{_named(event_id)}the signature of {server_name} with {key_id}: {reason}"
        )
        self.reason = reason
        self.event_id = event_id
        self.server_name = server_name
        self.key_id = key_id


class AuthDenied(InputError):
    """An authorisation rule refuses the event: keep it as rejected, it takes no effect.

    `rule` is a short stable slug such as "member.join.banned"; `reason` has the values that broke
    the rule.
    """

    def __init__(self, reason: str, *, rule: str, event_id: str | None = None) -> None:
        super().__init__(f"{_named(event_id)}{reason} ({rule})")
        self.reason = reason
        self.rule = rule
        self.event_id = event_id


class UnknownRoomVersion(InputError):
    """The room version is unknown: update this package, or leave the room.

    The known ones are in storage.event.ROOM_VERSIONS.
    """

    def __init__(self, room_version: object) -> None:
        super().__init__(f"unknown room version {room_version!r}")
        self.room_version = room_version


class InvalidIdentifier(InputError):
    """The text does not have the form of such an id: correct the caller."""

    def __init__(self, identifier: str, reason: str) -> None:
        super().__init__(f"{identifier!r}: {reason}")
        self.identifier = identifier
        self.reason = reason


class UnknownRoom(InputError):
    """The store has no data of this room: join it, or append its create event first."""

    def __init__(self, room_id: str) -> None:
        super().__init__(f"unknown room {room_id}")
        self.room_id = room_id


class UnknownEvent(InputError):
    """The store does not have this event: fetch it from another server."""

    def __init__(self, event_id: str) -> None:
        super().__init__(f"unknown event {event_id}")
        self.event_id = event_id


class UnknownUser(InputError):
    """The store does not know this user: no room names them."""

    def __init__(self, user_id: str) -> None:
        super().__init__(f"unknown user {user_id}")
        self.user_id = user_id


class UnknownStream(InputError):
    """This process has not defined the stream: call `Store.define_stream` first."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the stream {name} is not defined: call define_stream({name!r}) first")
        self.name = name


class StateUnknown(InputError):
    """The event is stored without its state (an outlier).

    Append it again with `state_before`, or request the state from another server.
    """

    def __init__(self, event_id: str) -> None:
        super().__init__(f"the state at {event_id} is not known")
        self.event_id = event_id


class PartialState(InputError):
    """This server has joined the room with the members omitted, and the request needs them.

    Answer another server with 503, so that it asks elsewhere. Repeat the request when
    `Store.partial_rooms` does not list the room any more.
    """

    def __init__(self, room_id: str) -> None:
        super().__init__(f"the members of {room_id} are not all known yet")
        self.room_id = room_id


class WrongServerName(InputError):
    """The database belongs to another homeserver: open it under that name, or open another one."""

    def __init__(self, server_name: str, *, found: str, where: str = "the database") -> None:
        super().__init__(
            f"{where} belongs to {found}, not to {server_name}: open it as {found}, or another "
            f"database (or data folder, STORAGE_DATA_DIR) as {server_name}. A database takes "
            "another name only while it is empty and no other process uses it"
        )
        self.server_name = server_name
        self.found = found
        self.where = where

    def of(self, where: str) -> Self:
        """Return the same error, naming the database otherwise."""
        return type(self)(self.server_name, found=self.found, where=where)


class ExtraMissing(InputError):
    """A feature needs packages that a plain install lacks: install the extra, then try again."""

    def __init__(self, feature: str, extra: str, *, otherwise: str | None = None) -> None:
        super().__init__(
            f"{feature} needs an extra: pip install 'room-storage[{extra}]'"
            + (f", or {otherwise}" if otherwise else "")
        )
        self.feature = feature
        self.extra = extra


class ArchiveRunning(InputError):
    """Another process archives events, or returns or removes some: wait until it is done."""

    def __init__(self, what: str = "archive") -> None:
        super().__init__(f"another process works on the {what}: wait until it is done")
        self.what = what


class ArchiveNotOwned(InputError):
    """A folder of the archive belongs to another database: use another one, or take it over.

    No file has changed. The other database, of which this may be a copy, needs them.
    """

    def __init__(self, url: str, *, owner: str, database: str) -> None:
        super().__init__(
            f"the archive {url} belongs to another database ({owner}; this is {database}), and its"
            " files are not changed: use another folder, or a copy of it; if the other database is"
            " gone, run `room-storage archive --take-over`"
        )
        self.url = url
        self.owner = owner
        self.database = database


class PurgeRefused(InputError):
    """The purge is impossible, or not now: nothing has changed, the message names the remedy."""

    def __init__(self, reason: str, *, room_id: str) -> None:
        super().__init__(f"{room_id} is not purged: {reason}")
        self.reason = reason
        self.room_id = room_id


class PurgeRunning(PurgeRefused):
    """Another purge of the room is running: wait for its end, then repeat.

    `room-storage purge --jobs` lists it.
    """


class InvalidToken(InputError):
    """The token cannot be used: start without one.

    It is damaged, of another kind or of another deployment, or too many events have moved since.
    """

    def __init__(self, token: str, reason: str) -> None:
        super().__init__(f"token {token!r}: {reason}")
        self.token = token
        self.reason = reason


class UnknownPos(InputError):
    """The connection has expired, or a later `pos` was used: start again without `pos`.

    A `pos` of another database has expired, too. The client-server API calls it M_UNKNOWN_POS.
    """

    def __init__(self, pos: str, reason: str) -> None:
        super().__init__(f"pos {pos!r}: {reason}")
        self.pos = pos
        self.reason = reason


class ResyncNeeded(InputError):
    """The token is too old, or the reader too far behind: start again without `since`."""

    def __init__(self, since: str, reason: str) -> None:
        super().__init__(f"since {since!r}: {reason}")
        self.since = since
        self.reason = reason


class ProtocolError(StorageError):
    """A replication line is malformed: close the connection and connect again."""

    def __init__(self, reason: str, *, line: str | None = None) -> None:
        super().__init__(reason if line is None else f"{reason}: {line!r}")
        self.reason = reason
        self.line = line


class DatabaseError(StorageError):
    """Postgres refused or failed.

    `sqlstate` is its code where it gave one; the driver's error is the __cause__.
    """

    def __init__(self, reason: str, *, sqlstate: str | None = None) -> None:
        super().__init__(reason if sqlstate is None else f"{reason} (SQLSTATE {sqlstate})")
        self.reason = reason
        self.sqlstate = sqlstate


class DatabaseUnavailable(DatabaseError):
    """No connection, or it was lost before COMMIT: nothing was written, repeat later."""


class DatabaseReplaced(DatabaseUnavailable):
    """The database was restored, or a standby took over: nothing was written, repeat.

    The last writes may be lost. The store enters the database again by itself. Where that fails,
    the message has the reason.
    """


class ReplicaBehind(DatabaseError):
    """The standby has not replayed a token in time: repeat later, or read from the primary.

    `Config.replica_wait_ms` is how long a read waits.
    """


class DatabaseFull(DatabaseError):
    """Out of disk, memory or connections: nothing was written; free some, then repeat."""


class DatabaseConflict(DatabaseError):
    """More conflicts with other writers than configured retries: nothing was written, repeat."""


class CommitUnknown(DatabaseError):
    """The connection was lost during COMMIT: repeat, since an append is idempotent by event id."""


class InstanceNameTaken(DatabaseError):
    """Another process writes under this name: nothing was written.

    Stop one of them, or give each an `instance_name` of its own.
    """


class PermissionRefused(DatabaseError):
    """The role lacks a privilege (the runtime role may only append): use the right role."""


class ConstraintViolated(DatabaseError):
    """A constraint refused a row, by a defect of this package or a direct edit.

    Run `room-storage verify --repair`. If it finds nothing, report the constraint's name.
    """

    def __init__(self, reason: str, *, constraint: str, sqlstate: str | None = None) -> None:
        super().__init__(f"{constraint}: {reason}", sqlstate=sqlstate)
        self.constraint = constraint


class ArchiveUnavailable(StorageError):
    """The archive of old events cannot be reached, or is full: mend it, then repeat the call.

    Nothing is lost. Events that are not archived can still be read.
    """

    def __init__(self, reason: str, *, url: str) -> None:
        super().__init__(f"the archive {url} cannot be used: {reason}")
        self.reason = reason
        self.url = url


class SchemaOutOfDate(StorageError):
    """The database has an older schema than this package can serve: run `room-storage migrate`.

    ``rewritten``: it is of release 0.2.0 or earlier, and no migration continues from there. A new
    database is needed.
    """

    def __init__(
        self,
        *,
        found: str | None,
        wanted: str,
        rewritten: bool = False,
        where: str = "the database",
    ) -> None:
        has = "no tables of room-storage" if found is None else f"the revision {found}"
        super().__init__(
            f"{where} has {has} of release 0.2.0 or earlier (or was restored without its "
            "comments), from which no migration continues: run `room-storage export` with the "
            "release that wrote it, then `room-storage migrate` and `room-storage import` on a "
            "new database"
            if rewritten
            else f"{where} has {has}, wanted is the revision {wanted}: "
            "run `room-storage migrate` on it, or use storage.open(…, migrate=True)"
        )
        self.found = found
        self.wanted = wanted
        self.rewritten = rewritten
        self.where = where

    def of(self, where: str) -> Self:
        """Return the same error, naming the database otherwise."""
        return type(self)(
            found=self.found, wanted=self.wanted, rewritten=self.rewritten, where=where
        )


class SchemaTooNew(StorageError):
    """The database was migrated past what this package can serve: install a later release.

    The release that migrated it is new enough.
    """

    def __init__(self, *, found: str, wanted: str, needed: str) -> None:
        super().__init__(
            f"the schema is {found}, and needs code that knows {needed}; this package knows "
            f"{wanted}: install the release it was migrated with "
            f"(see `room-storage migrate --list` there), or restore an earlier backup"
        )
        self.found = found
        self.wanted = wanted
        self.needed = needed


class MigrationBlocked(StorageError):
    """A step of a migration has to wait: do what the message names, then run the migration again.

    Nothing of the step was done.
    """

    def __init__(self, reason: str, *, revision: str) -> None:
        super().__init__(f"the step {revision} has to wait: {reason}")
        self.reason = reason
        self.revision = revision


class ReadOnly(StorageError):
    """The store was opened with ``read_only``: write with a store on the primary."""

    def __init__(self, what: str = "store") -> None:
        super().__init__(f"the {what} was opened with read_only: write with one on the primary")
        self.what = what


class StorageClosed(StorageError):
    """The store was closed: open another."""

    def __init__(self, what: str = "store") -> None:
        super().__init__(f"the {what} is closed")
        self.what = what


class StorageCorrupt(StorageError):
    """An invariant is broken: stop writing and run `room-storage verify`.

    `ids` has the contradicting values.
    """

    def __init__(self, reason: str, **ids: object) -> None:
        super().__init__(reason + "".join(f" {name}={value!r}" for name, value in ids.items()))
        self.reason = reason
        self.ids = ids
