"""The names a homeserver imports: adding one is a line here, losing one is a break."""

import storage

NAMES = """
AppendResult AuthDenied CommitUnknown Config ConstraintViolated DatabaseConflict DatabaseError DatabaseFull DatabaseUnavailable EventId InputError
InvalidEvent InvalidIdentifier InvalidSignature InvalidToken PermissionRefused ProtocolError ResyncNeeded RoomId SchemaOutOfDate
ServerName StateKey StateUnknown StorageClosed StorageCorrupt StorageError Store StoredEvent UnknownEvent UnknownRoom UnknownRoomVersion UnknownUser UserId open
Context Gap InvitedRoom JoinedRoom KnockedRoom LeftRoom Page StateIds Sync Timeline
"""


def test_the_public_names_are_these() -> None:
    assert sorted(storage.__all__) == sorted(NAMES.split())
    assert all(hasattr(storage, name) for name in storage.__all__)
