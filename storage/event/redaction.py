"""Redaction: the part of an event that remains when its content is removed.

Source: Matrix specification, room versions, "Redactions" of each version.
"""

from typing import Any

from storage.event.versions import RoomVersion, version_of


def redact(pdu: dict[str, Any], room_version: str | RoomVersion) -> dict[str, Any]:
    """Return the redacted form of `pdu` as a new dict; drop `unsigned`, keep hashes and signatures.

    Kept values are shared with `pdu`, not copied. A content that is missing or not an object
    becomes {}: published signatures of events without content cover that form.
    """
    version = version_of(room_version)
    keys = version.redaction_keys
    redacted = {key: value for key, value in pdu.items() if key in keys}
    redacted["content"] = redacted_content(pdu.get("type"), pdu.get("content"), version)
    return redacted


def redacted_content(event_type: object, content: object, version: RoomVersion) -> dict[str, Any]:
    """Return the part of the content that redaction keeps for this event type."""
    if not isinstance(content, dict) or not isinstance(event_type, str):
        return {}
    if version.redaction_keeps_create and event_type == "m.room.create":
        return content
    keys = version.redaction_content.get(event_type)
    if keys is None:
        return {}
    kept = {key: value for key, value in content.items() if key in keys}
    if version.redaction_keeps_signed_invite and event_type == "m.room.member":
        invite = content.get("third_party_invite")
        if isinstance(invite, dict) and "signed" in invite:
            kept["third_party_invite"] = {"signed": invite["signed"]}
    return kept
