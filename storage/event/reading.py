"""From bytes to a JSON object that has one meaning for every server.

orjson reads first. It reads a number as the servers do (Python's json, then canonicaljson) unless
the number is

* an integer beyond 64 bits, which orjson turns into a float;
* `-0`, which both read as 0, and which canonical JSON forbids (versions 6 and later);
* too large for a double: orjson refuses it, a long integer among them.

So Python's json reads an object with a float, a large integer or a `-0` a second time, with hooks
on the lexemes.

Versions 6 and later: integers within ±(2^53 - 1), written without fraction, exponent or a negative
zero; anything else is an InvalidEvent. Versions 1 to 5: as Python reads and canonicaljson writes.
So for the hashes `1e2` is 100.0, `1.0` is 1.0, `-0` is 0, `-0.0` is -0.0, and a 30 digit integer is
itself. Refused are NaN, infinities (`1e400`), and integers of more than 4,300 digits, which Python
does not convert.

The last of duplicate keys counts, as in every server. Lone surrogates are refused: they have no
UTF-8 form.

`unsigned` never decides: no hash and no signature covers it, so any server on the way may have
written it. If a check fails with it, it is cut out of the bytes, and only the rest is checked. The
usual PDU is not searched for it.
"""

import gc
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from math import isinf
from typing import Any, Final, Literal, NamedTuple

import orjson

from storage.errors import InvalidEvent
from storage.event.hashes import BadNumber, canonical, content_hash_fits, defect_of
from storage.event.model import Event, make_event
from storage.ids import EventId, intern

MAX_PDU_BYTES: Final = 65_536  # of canonical JSON
# as received; 65,536 escaped characters are 393,216 bytes, the rest is room for spaces
MAX_RAW_BYTES: Final = 1_048_576
# levels; no specification has a limit: Python servers stop near 1,000, serde_json at 128
MAX_NESTING: Final = 500
MAX_INTEGER: Final = 2**53 - 1  # canonical JSON
LARGE: Final = 4_096  # bytes, of which a thousand lists could be read


_UNSIGNED: Final = "unsigned"
_EXTRA_KEYS: Final = frozenset({"age_ts", "outlier", "destinations"})
_EXTRA_TEXTS: Final = tuple(f'"{key}"'.encode() for key in sorted(_EXTRA_KEYS))
# A string with the comma before it, or a run of brackets, as nesting may be the defect. An open
# string ends with the text, so that the search takes linear time.
_TOKEN: Final = re.compile(
    rb'(?P<comma>,[ \t\r\n]*)?(?P<text>"[^"\\]*(?:\\.[^"\\]*)*"?)|[\[{]+|[\]}]+', re.DOTALL
)


class Read(NamedTuple):
    """A PDU as it was read; ``exact`` if canonical JSON allows all its numbers, all integers.

    ``raw`` are the bytes of ``value``: the given ones, without `unsigned` if it was bad.
    """

    value: dict[str, Any]
    exact: bool
    raw: bytes


@contextmanager
def uncollected() -> Iterator[None]:
    """Run a block that makes no cycles without the garbage collector. It must not await.

    A JSON text of 20,000 lists starts it thirty times, and every third pass visits all objects of
    the process.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def loads(raw: bytes) -> Any:
    """Read any JSON value; a large one without the garbage collector."""
    if len(raw) < LARGE:
        return orjson.loads(raw)
    with uncollected():
        return orjson.loads(raw)


def peek(raw: bytes) -> dict[str, Any] | None:
    """Peek at the object in `raw`, to find its room; return None if it cannot be read so.

    Nothing is checked. `unsigned` is None where it cannot be read itself.
    """
    try:
        value = loads(raw)
    except orjson.JSONDecodeError:
        return _peek_without_unsigned(raw)
    return value if type(value) is dict else None


def _peek_without_unsigned(raw: bytes) -> dict[str, Any] | None:
    cut = without_unsigned(raw) if len(raw) <= MAX_RAW_BYTES else None
    try:
        return None if cut is None else {**orjson.loads(cut), _UNSIGNED: None}
    except orjson.JSONDecodeError:
        return None


def read(raw: bytes, *, strict: bool, header: dict[str, Any] | None = None) -> Read:
    """Read the object in `raw` and check its size, nesting, text and numbers.

    Raise InvalidEvent if a check fails. `strict` is the room version's strict_canonical_json.
    `header` is `peek(raw)`, where that was needed before.
    """
    if len(raw) > MAX_RAW_BYTES:
        raise InvalidEvent(f"{len(raw)} bytes, more than {MAX_RAW_BYTES}", kind="too_large")
    try:
        result = None if _is_bad(header) else _read(raw, strict=strict, header=header)
        failure = None
    except InvalidEvent as error:
        result, failure = None, error
    if result is not None and not _is_bad(result.value):
        return result
    cut = without_unsigned(raw)
    if cut is not None:
        return _read(cut, strict=strict)
    raise failure or InvalidEvent("not JSON")


def _is_bad(value: dict[str, Any] | None) -> bool:
    """Return whether an object has an `unsigned` that is no object."""
    return value is not None and type(value.get(_UNSIGNED, value)) is not dict


def without_unsigned(raw: bytes) -> bytes | None:
    """Return the object's text without its member `unsigned`; None if it has none.

    All other members keep their bytes. The text need not be JSON, and what is returned need not be.
    """
    begin = len(raw) - len(raw.lstrip()) + 1
    if raw[begin - 1 : begin] != b"{":
        return None
    members: list[tuple[int, int]] = []  # (begin, end) of those to keep
    depth, is_kept, is_first, has_unsigned = 1, True, True, False
    for token in _TOKEN.finditer(raw, begin):
        start, end = token.span()
        if token.lastgroup is not None:
            if depth == 1 and (is_first or token["comma"] is not None):
                if not is_first:
                    members += [(begin, start)] * is_kept
                    begin = token.start("text")
                is_first, is_kept = False, not _names_unsigned(token["text"])
                has_unsigned = has_unsigned or not is_kept
        elif raw[start] in b"{[":
            depth += end - start
        elif (depth := depth - (end - start)) <= 0:
            members += [(begin, end - 1)] * is_kept
            is_whole = has_unsigned and not depth and not raw[end:].strip()
            return b"{" + b",".join(raw[a:b] for a, b in members) + b"}" if is_whole else None
    return None


def _names_unsigned(text: bytes) -> bool:
    """Return whether a JSON string is the key; it may be escaped."""
    if b"\\" not in text:
        return text == b'"unsigned"'
    try:
        return bool(json.loads(text) == _UNSIGNED)
    except ValueError:
        return False


def _read(raw: bytes, *, strict: bool, header: dict[str, Any] | None = None) -> Read:
    encode = len(raw) > MAX_PDU_BYTES
    value: dict[str, Any]
    try:
        value = loads(raw) if header is None else header
    except orjson.JSONDecodeError as error:
        is_deep = raw.count(b"{") + raw.count(b"[") > MAX_NESTING
        value = {} if is_deep else _read_lexemes(raw, _STRICT if strict else _LENIENT)
        if strict or is_deep:
            raise InvalidEvent(f"not JSON: {error}") from error
        encode = True
    if type(value) is not dict:
        raise InvalidEvent("not a JSON object")
    numbers = _numbers(value)
    if numbers == "other" or (numbers == "zero" and strict and b"-0" in raw):
        value = _read_lexemes(raw, _STRICT if strict else _LENIENT)
        encode = encode or not strict
    # Canonical JSON is never longer than its source, unless a float is: 1e15 becomes
    # 1000000000000000.0. The second reader also accepts a lone surrogate, which cannot be encoded.
    if encode and (size := len(canonical(value))) > MAX_PDU_BYTES:
        raise InvalidEvent(
            f"{size} bytes of canonical JSON, more than {MAX_PDU_BYTES}", kind="too_large"
        )
    return Read(value, strict or numbers != "other", raw)


def without_extra_keys(raw: bytes) -> bytes | None:
    """Return a PDU without the keys of old servers, if its content hash fits only so; else None.

    Synapse and Dendrite leave these keys out of the content hash, and the specification does not.
    They are in no signature and no event id.
    """
    if not any(key in raw for key in _EXTRA_TEXTS):
        return None
    try:
        value = json.loads(raw)
        if type(value) is not dict or _EXTRA_KEYS.isdisjoint(value) or content_hash_fits(value):
            return None
        rest = {key: member for key, member in value.items() if key not in _EXTRA_KEYS}
        return canonical(rest) if content_hash_fits(rest) else None
    except (ValueError, RecursionError, InvalidEvent):  # `read` has the reason
        return None


def read_trusted(raw: bytes, *, strict: bool) -> dict[str, Any]:
    """Read the same object from bytes that `read` accepted before."""
    try:
        value: dict[str, Any] = loads(raw)
    except orjson.JSONDecodeError:  # an integer of more than 308 digits
        return _read_lexemes(raw, _LENIENT)
    return value if strict or _numbers(value) != "other" else _read_lexemes(raw, _LENIENT)


def _numbers(value: dict[str, Any]) -> Literal["plain", "zero", "other"]:
    """Return "other" if canonical JSON does not allow all numbers, or one is no integer.

    Otherwise return "zero" if there is a zero, perhaps written -0, else "plain". Raise InvalidEvent
    where the object is nested too deeply for later recursive walks.
    """
    integers: list[int] = []
    exact = True
    containers: list[Any] = [value.values()]
    for items in containers:
        for item in items:
            kind = type(item)
            if kind is str:
                continue
            if kind is dict:
                containers.append(item.values())
            elif kind is list:
                containers.append(item)
            elif kind is int:
                integers.append(item)
            elif kind is float:
                exact = False
    if len(containers) > MAX_NESTING and _deeper_than(value, MAX_NESTING):
        raise InvalidEvent(f"nested more than {MAX_NESTING} levels deep")
    if not exact or (integers and (max(integers) > MAX_INTEGER or min(integers) < -MAX_INTEGER)):
        return "other"
    return "zero" if 0 in integers else "plain"


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner = chain.from_iterable(v.values() if isinstance(v, dict) else v for v in level)
        level = [v for v in inner if isinstance(v, dict | list)]
        if not level:
            return False
    return True


def _read_lexemes(raw: bytes, decoder: json.JSONDecoder) -> dict[str, Any]:
    try:
        value = decoder.decode(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InvalidEvent("not UTF-8") from error
    except RecursionError as error:
        # only where the caller's own stack is deep: the nesting is limited before
        raise InvalidEvent("nested too deeply") from error
    except ValueError as error:
        raise InvalidEvent(f"not JSON: {error}") from error
    if type(value) is not dict:
        raise InvalidEvent("not a JSON object")
    if (defect := defect_of(value)) is not None:
        raise defect
    return value


def _strict_integer(lexeme: str) -> int | BadNumber:
    if (
        lexeme == "-0"
        or len(lexeme) > 17
        or not -MAX_INTEGER <= (value := int(lexeme)) <= MAX_INTEGER
    ):
        return BadNumber(f"the number {_shown(lexeme)} is not allowed in canonical JSON")
    return value


def _strict_float(lexeme: str) -> BadNumber:
    return BadNumber(f"the number {_shown(lexeme)} is not an integer")


def _lenient_float(lexeme: str) -> float | BadNumber:
    value = float(lexeme)
    if isinf(value):
        return BadNumber(f"the number {_shown(lexeme)} is out of range")
    return value


def _no_constant(name: str) -> BadNumber:
    return BadNumber(f"{name} is not JSON")


def _shown(lexeme: str) -> str:
    return lexeme if len(lexeme) <= 40 else f"{lexeme[:20]}… ({len(lexeme)} characters)"


_STRICT: Final = json.JSONDecoder(
    parse_int=_strict_integer, parse_float=_strict_float, parse_constant=_no_constant
)
_LENIENT: Final = json.JSONDecoder(parse_float=_lenient_float, parse_constant=_no_constant)


# --------------------------------------------------------------------------------------------------
# Events as a process keeps them between batches: with what later checks read, and no more.

_MEMBER: Final = "m.room.member"
_MEMBER_KEYS: Final = ("membership", "join_authorised_via_users_server", "third_party_invite")
_WHOLE: Final = frozenset({
    "m.room.create",
    "m.room.history_visibility",
    "m.room.join_rules",
    "m.room.power_levels",
    "m.room.third_party_invite",
})  # fmt: skip
_NAMED: Final = ("m.new_content", "url")
"""Keys of a message of which only the presence counts."""
_NOTHING: Final[dict[str, Any]] = {}
SHARED: Final = 256  # contents
WORD_MAX: Final = 32  # characters


def without_json(event: Event) -> Event:
    """Return the event without its parsed object, which takes half of the memory of an event.

    The bytes that its signatures cover go, too. All other fields stay. A create event keeps `json`:
    only there values are looked up in it. Garbage collection also visits three objects less per
    event.
    """
    if event.type == "m.room.create" or not event.json:
        return event
    return _copied(event, event.content, event.raw)


def as_written(event: Event) -> Event:
    """Return a long message as planning and writing read it: without its other values.

    It may have 30,000 lists, and so may each event of its batch. They would all be freed at once.
    """
    if event.state_key is not None or len(event.raw) < LARGE:
        return event
    content: dict[str, Any] = {key: True for key in _NAMED if key in event.content}
    relates_to = event.content.get("m.relates_to")
    if isinstance(relates_to, dict):
        texts = ((key, relates_to.get(key)) for key in ("rel_type", "event_id"))
        content["m.relates_to"] = {key: value for key, value in texts if isinstance(value, str)}
    return _copied(event, content, event.raw)


def for_auth_checks(event: Event) -> Event:
    """Return an accepted state event as later auth checks and resolutions read it.

    It has no bytes, and of its content only what an auth rule or the visibility of history reads.
    Equal strings are one object (`storage.ids.intern`), as are equal contents of one word. The
    events of versions 1 and 2 keep their bytes: their reference hashes are cited.
    `docs/benchmarks/append.md` has the memory of a room.
    """
    if event.room_version.reference_pairs:
        return without_json(event)
    return _copied(event, _content(event), b"")


def _copied(event: Event, content: dict[str, Any], raw: bytes) -> Event:
    return make_event(
        intern(event.event_id),
        intern(event.room_id),
        event.room_version,
        intern(event.type),
        intern(event.sender),
        None if event.state_key is None else intern(event.state_key),
        content,
        event.depth,
        event.origin_server_ts,
        interned_ids(event.prev_event_ids),
        interned_ids(event.auth_event_ids),
        event.redacts,
        raw,
        event.json if event.type == "m.room.create" else _NOTHING,
        event.content_hash_valid,
        None,
    )


def interned_ids(ids: tuple[EventId, ...]) -> tuple[EventId, ...]:
    """Return the ids, each the one object that equal ids share."""
    return tuple(map(intern, ids))  # type: ignore[arg-type]


def _content(event: Event) -> dict[str, Any]:
    content = event.content
    if event.type == _MEMBER:
        content = {key: content[key] for key in _MEMBER_KEYS if key in content}
    elif event.type not in _WHOLE:
        return _NOTHING
    if len(content) == 1:
        [(key, value)] = content.items()
        if type(value) is str and len(value) <= WORD_MAX:
            return _single_member(key, value)
    return content


@lru_cache(SHARED)
def _single_member(key: str, value: str) -> dict[str, Any]:
    return {key: value}
