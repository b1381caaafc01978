"""Room versions 1 to 12 as a table of flags.

One row differs from the one before it in what the table says, nothing else in the package compares
version numbers. Source: Matrix specification, room versions, v1 to v12.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Final, Literal

from storage.errors import UnknownRoomVersion

EventIdFormat = Literal["in_pdu", "base64", "url_safe_base64"]

_KEYS_V1: Final = frozenset(
    {
        *(
            "event_id",
            "type",
            "room_id",
            "sender",
            "state_key",
            "content",
            "hashes",
            "signatures",
            "depth",
        ),
        *("prev_events", "auth_events", "origin_server_ts", "prev_state", "origin", "membership"),
    },
)
_KEYS_V11: Final = _KEYS_V1 - {"prev_state", "origin", "membership"}

_CONTENT_V1: Final[Mapping[str, frozenset[str]]] = MappingProxyType(
    {
        "m.room.member": frozenset({"membership"}),
        "m.room.create": frozenset({"creator"}),
        "m.room.join_rules": frozenset({"join_rule"}),
        "m.room.power_levels": frozenset(
            {
                "ban",
                "events",
                "events_default",
                "kick",
                "redact",
                "state_default",
                "users",
                "users_default",
            },
        ),
        "m.room.aliases": frozenset({"aliases"}),
        "m.room.history_visibility": frozenset({"history_visibility"}),
    }
)
_CONTENT_V6: Final = MappingProxyType(
    {k: v for k, v in _CONTENT_V1.items() if k != "m.room.aliases"}
)
_CONTENT_V8: Final = MappingProxyType(
    {**_CONTENT_V6, "m.room.join_rules": frozenset({"join_rule", "allow"})}
)
_CONTENT_V9: Final = MappingProxyType(
    {
        **_CONTENT_V8,
        "m.room.member": frozenset({"membership", "join_authorised_via_users_server"}),
    }
)
_CONTENT_V11: Final = MappingProxyType(
    {
        **{k: v for k, v in _CONTENT_V9.items() if k != "m.room.create"},
        "m.room.power_levels": _CONTENT_V1["m.room.power_levels"] | {"invite"},
        "m.room.redaction": frozenset({"redacts"}),
    }
)


def _v1_content() -> Mapping[str, frozenset[str]]:
    return _CONTENT_V1


@dataclass(frozen=True, slots=True, eq=False)
class RoomVersion:
    """The rules of one room version; each flag is named after the behaviour when it is set.

    There is one object per version: compare with `is`. It pickles as its identifier.
    """

    identifier: str
    # The form of an event.
    event_id_format: EventIdFormat = "in_pdu"
    reference_pairs: bool = True  # prev_events and auth_events are [id, {hash}] pairs, not ids
    # integers within ±(2^53 - 1) only; if False, floats and large integers are kept
    strict_canonical_json: bool = False
    # the room id is the create event's id, which itself has no room_id
    create_room_id: bool = False
    # a type or state key of more than 255 bytes is malformed; if False, one of at most 255
    # characters is read, and the auth rules refuse the event, as in other servers
    strict_key_bytes: bool = False
    # Redaction. First the top-level keys that are kept.
    redaction_keys: frozenset[str] = field(default=_KEYS_V1, repr=False)
    # type -> content keys that are kept
    redaction_content: Mapping[str, frozenset[str]] = field(default_factory=_v1_content, repr=False)
    redaction_keeps_create: bool = False  # content of m.room.create is kept whole
    # `third_party_invite.signed` of a member event is kept
    redaction_keeps_signed_invite: bool = False
    redacts_in_content: bool = False  # `redacts` is in the content, not at the top
    # the auth rules refuse a forbidden redaction; if False, it is stored but takes no effect
    redaction_by_auth_rule: bool = True
    # top-level keys of an event that loses none when redacted
    common_keys: frozenset[str] = field(init=False, repr=False)
    # Authorisation.
    special_case_aliases: bool = True  # m.room.aliases has an auth rule of its own
    enforce_key_validity: bool = False  # a signing key must have been valid at origin_server_ts
    # `notifications` of power levels is checked like `events`
    limit_notifications_power: bool = False
    knock: bool = False
    restricted_join: bool = False
    knock_restricted: bool = False
    # the loosest form read as a level
    power_levels: Literal["float", "string", "integer"] = "float"
    # the creator is the create event's sender, not `content.creator`
    creator_is_sender: bool = False
    privileged_creators: bool = False  # creators (also `additional_creators`) are above every level
    # State resolution.
    state_resolution: Literal["v1", "v2", "v2.1"] = "v1"

    def __post_init__(self) -> None:
        object.__setattr__(self, "common_keys", self.redaction_keys - {"event_id"} | {"unsigned"})

    def __reduce__(self) -> tuple[object, ...]:
        return version_of, (self.identifier,)

    def is_restricted(self, join_rule: object) -> bool:
        """Return whether members of other rooms may join by this join rule."""
        return (join_rule == "restricted" and self.restricted_join) or (
            join_rule == "knock_restricted" and self.knock_restricted
        )

    def may_knock(self, join_rule: object) -> bool:
        """Return whether users may knock by this join rule."""
        return (join_rule == "knock" and self.knock) or (
            join_rule == "knock_restricted" and self.knock_restricted
        )

    def may_have_room(self, room_id: str) -> bool:
        """Return whether this version can have a room with this id.

        The id names a server unless it is made of the create event.
        """
        return (":" in room_id) != self.create_room_id


def _table() -> Mapping[str, RoomVersion]:
    v1 = RoomVersion("1")
    v2 = replace(v1, identifier="2", state_resolution="v2")
    v3 = replace(
        v2,
        identifier="3",
        event_id_format="base64",
        reference_pairs=False,
        redaction_by_auth_rule=False,
    )
    v4 = replace(v3, identifier="4", event_id_format="url_safe_base64")
    v5 = replace(v4, identifier="5", enforce_key_validity=True)
    v6 = replace(
        v5,
        identifier="6",
        strict_canonical_json=True,
        special_case_aliases=False,
        limit_notifications_power=True,
        power_levels="string",
        redaction_content=_CONTENT_V6,
    )
    v7 = replace(v6, identifier="7", knock=True)
    v8 = replace(v7, identifier="8", restricted_join=True, redaction_content=_CONTENT_V8)
    v9 = replace(v8, identifier="9", redaction_content=_CONTENT_V9)
    v10 = replace(v9, identifier="10", knock_restricted=True, power_levels="integer")
    v11 = replace(
        v10,
        identifier="11",
        creator_is_sender=True,
        redaction_keys=_KEYS_V11,
        redaction_content=_CONTENT_V11,
        redaction_keeps_create=True,
        redaction_keeps_signed_invite=True,
        redacts_in_content=True,
        strict_key_bytes=True,
    )
    v12 = replace(
        v11, identifier="12", create_room_id=True, privileged_creators=True, state_resolution="v2.1"
    )
    return MappingProxyType(
        {v.identifier: v for v in (v1, v2, v3, v4, v5, v6, v7, v8, v9, v10, v11, v12)}
    )


ROOM_VERSIONS: Final[Mapping[str, RoomVersion]] = _table()


def version_of(room_version: str | RoomVersion) -> RoomVersion:
    """Return the row of the table; raise UnknownRoomVersion for an unknown version."""
    if isinstance(room_version, RoomVersion):
        return room_version
    try:
        return ROOM_VERSIONS[room_version]
    except (KeyError, TypeError):
        raise UnknownRoomVersion(room_version) from None
