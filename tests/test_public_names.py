"""The names a homeserver imports: adding one is a line here, losing one is a break."""

import storage

NAMES = """
Aggregations AppendResult AuthDenied CommitUnknown Config ConstraintViolated Context
DatabaseConflict DatabaseError DatabaseFull DatabaseReplaced DatabaseUnavailable EventFilter EventId
ExtraMissing Gap InputError InstanceNameTaken InvalidEvent InvalidIdentifier InvalidSignature
InvalidToken InvitedRoom JoinedRoom KnockedRoom LeftRoom MigrationBlocked OpenGap Page
PermissionRefused ProtocolError PurgeRefused PurgeRunning RelationsPage ResyncNeeded RoomId
RoomSummary SchemaOutOfDate SchemaTooNew ServerName StateIds StateKey StateUnknown StorageClosed
StorageCorrupt StorageError Store StoredEvent Sync SyncFilter ThreadSummary Timeline UnknownEvent
UnknownRoom UnknownRoomVersion UnknownUser UserId WrongServerName __version__ auth event
federation open replication streams visibility
"""


def test_the_public_names_are_these() -> None:
    assert sorted(storage.__all__) == sorted(NAMES.split())
    assert all(hasattr(storage, name) for name in storage.__all__)
