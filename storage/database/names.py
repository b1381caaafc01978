"""Interned names: numbers for event and relation types, state keys, users and servers in tables.

The schema fixes the numbers below 1000, so that the code can use them. All others are assigned on
first use, inside the write that uses them first (storage/persist), and never change.
"""

from collections.abc import Iterable
from typing import Final, LiteralString

from storage.database.connection import Connection
from storage.errors import UnknownRoom
from storage.ids import RoomId

TYPE_CREATE: Final = 1
TYPE_MEMBER: Final = 2
TYPE_POWER_LEVELS: Final = 3
TYPE_JOIN_RULES: Final = 4
TYPE_HISTORY_VISIBILITY: Final = 5
TYPE_REDACTION: Final = 7

REL_REPLACE: Final = 19
REL_ANNOTATION: Final = 20
REL_REFERENCE: Final = 21
REL_THREAD: Final = 22

KEY_CREATE: Final = 1
KEY_POWER_LEVELS: Final = 3
KEY_JOIN_RULES: Final = 4
KEY_HISTORY_VISIBILITY: Final = 5

PRINCIPAL_EVERYBODY: Final = 1
PRINCIPAL_SHARED: Final = 2

MEMBERSHIPS: Final = {"ban": 1, "leave": 2, "knock": 3, "invite": 4, "join": 5}
MEMBERSHIP_NAMES: Final = {code: name for name, code in MEMBERSHIPS.items()}
INVITE: Final = MEMBERSHIPS["invite"]
JOIN: Final = MEMBERSHIPS["join"]

KNOWN_TYPES: Final = {
    "m.room.create": 1,
    "m.room.member": 2,
    "m.room.power_levels": 3,
    "m.room.join_rules": 4,
    "m.room.history_visibility": 5,
    "m.room.third_party_invite": 6,
    "m.room.redaction": 7,
    "m.room.message": 8,
    "m.room.name": 9,
    "m.room.topic": 10,
    "m.room.canonical_alias": 11,
    "m.room.avatar": 12,
    "m.room.encryption": 13,
    "m.room.guest_access": 14,
    "m.room.server_acl": 15,
    "m.room.tombstone": 16,
    "m.reaction": 17,
    "m.room.encrypted": 18,
    "m.replace": 19,
    "m.annotation": 20,
    "m.reference": 21,
    "m.thread": 22,
}
KNOWN_EMPTY_KEYS: Final = (
    1,
    3,
    4,
    5,
    9,
    10,
    11,
    12,
    13,
    14,
    15,
    16,
)  # state keys (type n, "") have the nid n


def membership_code(membership: object) -> int:
    """Return the number of a membership; 0 for a value that is none of the five."""
    return MEMBERSHIPS.get(membership, 0) if isinstance(membership, str) else 0


class InternedNames:
    """The interned names that a process knows, in both directions.

    All are forgotten at once when there are too many.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.forget()

    def forget(self) -> None:
        """Reset to the names that the schema fixes."""
        self.types: dict[str, int] = dict(KNOWN_TYPES)
        self.state_keys: dict[tuple[int, str], int] = {(nid, ""): nid for nid in KNOWN_EMPTY_KEYS}
        self.principals: dict[str, int] = {}
        self.principal_names: dict[int, str] = {}
        self.type_names: dict[int, str] = {nid: name for name, nid in KNOWN_TYPES.items()}
        self.state_key_names: dict[int, tuple[int, str]] = {
            nid: (nid, "") for nid in KNOWN_EMPTY_KEYS
        }

    def learn(
        self,
        types: Iterable[tuple[str, int]] = (),
        state_keys: Iterable[tuple[tuple[int, str], int]] = (),
        principals: Iterable[tuple[str, int]] = (),
    ) -> None:
        """Remember names that are committed in the database."""
        if len(self.types) + len(self.state_key_names) + len(self.principals) > self._limit:
            self.forget()
        for name, nid in types:
            self.types[name] = nid
            self.type_names[nid] = name
        for key, nid in state_keys:
            self.state_keys[key] = nid
            self.state_key_names[nid] = key
        for name, nid in principals:
            self.principals[name] = nid
            self.principal_names[nid] = name


# --------------------------------------------------------------------------------------------------
# The check whether the store has a room, for reads without a result.

SQL_ROOM_EXISTS: Final[LiteralString] = """
SELECT EXISTS (SELECT FROM rooms WHERE room_id = $1::text)
"""


async def require_room(conn: Connection, room_id: RoomId) -> None:
    """Raise `UnknownRoom` if the store does not have the room."""
    if not await conn.fetchval(SQL_ROOM_EXISTS, room_id):
        raise UnknownRoom(room_id)
