"""Events, pure: room versions, parsing, hashes, ids, redaction and signatures.

No I/O.

Read in this order: versions (the table), model (Event), parsing, reading (numbers and limits),
hashes, redaction, signatures, references, relation.
"""

from storage.event.hashes import content_hash, event_id, redact, reference_hash
from storage.event.model import Event, Relation, relation_of
from storage.event.parsing import load, parse
from storage.event.reading import peek
from storage.event.signatures import required_signers, sign, verify, verify_event
from storage.event.versions import ROOM_VERSIONS, RoomVersion

__all__ = [
    "ROOM_VERSIONS",
    "Event",
    "Relation",
    "RoomVersion",
    "content_hash",
    "event_id",
    "load",
    "parse",
    "peek",
    "redact",
    "reference_hash",
    "relation_of",
    "required_signers",
    "sign",
    "verify",
    "verify_event",
]
