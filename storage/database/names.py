"""Interned names: numbers for event and relation types, state keys, users and servers in tables.

The schema fixes the numbers below 1000, so that the code can use them. All others are assigned on
first use, inside the write that uses them first (storage/persist), and never change.

Statements write the fixed numbers by name, `membership = {JOIN}` (`NAMED_NUMBERS`).
"""

from collections.abc import Iterable
from typing import Final

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

ASSIGNED_FROM: Final = 1000
"""The first number that the schema does not fix."""

# Keys of advisory locks. A lock of one key and a lock of two never meet.
LOCK_ROOM: Final = 1919905645
"""With the room: a writer has it to its commit."""
LOCK_PURGE: Final = 1919905646
"""With the room: held by the session of a purge."""
LOCK_IMPORT: Final = 1919905646
"""Alone: held by the driver of an import."""
LOCK_IMPORT_WORK: Final = 1919905647
LOCK_IMPORT_ALIVE: Final = 1919905648
LOCK_IMPORT_RANGE: Final = 1919905649
"""With the number of an import (storage/pipeline/imports/stage.py)."""
LOCK_DEPLOYMENT: Final = 1919905649
LOCK_ARCHIVE: Final = 1919905650

NAMED_NUMBERS: Final = {
    **{name.upper(): code for name, code in MEMBERSHIPS.items()},
    **{f"TYPE_{name.split('.')[-1].upper()}": nid for name, nid in KNOWN_TYPES.items()},
    **{
        f"KEY_{name.split('.')[-1].upper()}": nid
        for name, nid in KNOWN_TYPES.items()
        if nid in KNOWN_EMPTY_KEYS
    },
    "REL_REPLACE": REL_REPLACE,
    "REL_ANNOTATION": REL_ANNOTATION,
    "REL_REFERENCE": REL_REFERENCE,
    "REL_THREAD": REL_THREAD,
    "PRINCIPAL_EVERYBODY": PRINCIPAL_EVERYBODY,
    "PRINCIPAL_SHARED": PRINCIPAL_SHARED,
    "ASSIGNED_FROM": ASSIGNED_FROM,
    "LOCK_ROOM": LOCK_ROOM,
    "LOCK_PURGE": LOCK_PURGE,
    "LOCK_IMPORT": LOCK_IMPORT,
    "LOCK_IMPORT_WORK": LOCK_IMPORT_WORK,
    "LOCK_IMPORT_ALIVE": LOCK_IMPORT_ALIVE,
    "LOCK_IMPORT_RANGE": LOCK_IMPORT_RANGE,
    "LOCK_DEPLOYMENT": LOCK_DEPLOYMENT,
    "LOCK_ARCHIVE": LOCK_ARCHIVE,
}
"""The names that a statement may use for numbers: `{JOIN}`, `{TYPE_MEMBER}`, `{KEY_NAME}`,
`{LOCK_ROOM}`. The last word of a type follows `TYPE_`, and also `KEY_`, its empty state key."""


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
