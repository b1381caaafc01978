"""`KeyRing`: the verify keys of other servers, requested when needed and kept while they are valid.

A key that a server publishes is valid until ``valid_until_ts``, and at most seven days from the
request. A key that it has retired is valid for events before ``expired_ts``. From room version 5
on, a key counts only if it was valid at the event's ``origin_server_ts``.

A server that fails is not asked again for `ReceiverLimits.key_retry_seconds`. Until then its events
are refused, while those of other servers are stored.

Source: server-server API, "Publishing keys", and room version 5, "Signing key validity period".
"""

import asyncio
import time
from collections import OrderedDict
from collections.abc import Collection, Iterable
from contextlib import suppress
from itertools import islice
from typing import Any, Final, NamedTuple
from weakref import WeakValueDictionary

from signedjson.key import (
    decode_verify_key_bytes,
    get_verify_key,
    is_signing_algorithm_supported,
)
from signedjson.sign import SignatureVerifyException, verify_signed_json
from signedjson.types import VerifyKey
from unpaddedbase64 import decode_base64

from storage.errors import InvalidSignature
from storage.event import Event, required_signers
from storage.federation.remote import JsonObject, ReceiverLimits, Remote, RemoteError
from storage.federation.requests import answer_of
from storage.ids import EventId, ServerName
from storage.persist.model.results import AppendResult
from storage.persist.receive import check_signatures
from storage.store.facade import Store
from storage.turns import in_turns

# --------------------------------------------------------------------------------------------------
# Locks by name within this process; a lock that nobody uses takes no memory.


class KeyedLocks:
    """One `asyncio.Lock` for each name in use."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def lock(self, name: str) -> asyncio.Lock:
        """Return the lock of a name; the caller holds the reference while it uses the lock."""
        lock = self._locks.get(name)
        if lock is None:
            lock = self._locks[name] = asyncio.Lock()
        return lock

    async def released(self, names: Iterable[str], seconds: float) -> None:
        """Wait until those who have the locks of these names now release them, for so long."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for name in names:
                    if (lock := self._locks.get(name)) is not None:
                        async with lock:
                            pass


VALIDITY_MS_MAX: Final = 7 * 24 * 3_600_000
FOREVER: Final = 1 << 62
RESPONSE_MAX: Final = 65_536
"""Characters and values of a response with keys. It has a key or two, and some retired ones."""
KEYS_MAX: Final = 500
"""Keys of a response, and retired ones, that are read: the first ones."""
SIGNATURES_MAX: Final = 10
"""Signatures of a response that are checked. Each takes a pass over the response."""
SIGNATURE_BYTES: Final = 1_280
"""A signature takes as long to check as so many bytes take to read (`storage.turns`)."""


class PublishedKeys(NamedTuple):
    """The keys of a server by key id, each with the last moment for which it counts.

    ``next_ts``: the server may be asked again from then on, by the monotonic clock in seconds.
    ``failure``: why it could not be asked; None if it answered.
    """

    keys: dict[str, tuple[VerifyKey, int]]
    next_ts: float
    failure: str | None = None

    def at(self, key_id: str, ts_ms: int | None) -> VerifyKey | None:
        """Return the key if it was valid then; without ``ts_ms``, at any time."""
        key, until_ms = self.keys.get(key_id, (None, 0))
        return key if ts_ms is None or ts_ms <= until_ms else None


class SigningNeed(NamedTuple):
    """A key that a signature names, and the time at which it must be valid; None for any time."""

    server: ServerName
    key_id: str
    ts_ms: int | None


def own_keys(store: Store) -> tuple[str, PublishedKeys] | None:
    """Return the name and the keys of this server, if its store has a signing key."""
    if store.signing_key is None:
        return None
    key = get_verify_key(store.signing_key)
    keys = {f"{key.alg}:{key.version}": (key, FOREVER), **store.old_signing_keys}
    return store.server_name, PublishedKeys(keys, FOREVER)


class KeyRing:
    """The verify keys of all servers. ``own`` is this server's name and keys: they need no request.

    It is used by many tasks at once; a server is asked once for all who wait.
    """

    def __init__(
        self, remote: Remote, limits: ReceiverLimits, own: tuple[str, PublishedKeys] | None
    ) -> None:
        self._remote = remote
        self._limits = limits
        self._published_keys: OrderedDict[str, PublishedKeys] = OrderedDict()
        self._locks = KeyedLocks()
        self._own_name = None if own is None else own[0]
        self._own = None if own is None else own[1]

    async def check(self, events: Collection[Event], seconds: float) -> dict[EventId, AppendResult]:
        """Return an "invalid" result for each event that is not signed as it must be, by id.

        Keys are requested for so many seconds, and at most `ReceiverLimits.keys_seconds`.
        """
        await self._request([need for event in events for need in needs_of(event)], seconds)
        refused: dict[EventId, AppendResult] = {}
        async for event in in_turns(events, size=_work):
            refusal = await self._check_event(event)
            if refusal is not None:
                refused[event.event_id] = refusal
        return refused

    async def check_signed(self, server: ServerName, signed: JsonObject, seconds: float) -> None:
        """Raise `InvalidSignature` unless an object has a signature of the server, valid now."""
        now = _now_ms()
        key_ids = islice(_key_ids(signed, server), SIGNATURES_MAX)
        needs = [SigningNeed(server, key_id, now) for key_id in key_ids]
        await self._request(needs, seconds)
        published = self._keys_of(server)
        keys = [published.at(need.key_id, now) for need in needs] if published is not None else []
        for key in filter(None, keys):
            if _is_signed(signed, server, key):
                return
            await asyncio.sleep(0)  # each signature takes a pass over the object
        failure = self._failure_of(server) if needs else "there is no signature"
        raise InvalidSignature(
            f"it is not signed by {server}: {failure or 'no signature fits a valid key'}",
            server_name=server,
        )

    def lacks_keys_of(self, event: Event) -> bool:
        """Return whether a signature cannot be checked, as its server could not be asked."""
        return any(
            self._failure_of(need.server) is not None and self._key_of(need) is None
            for need in needs_of(event)
        )

    async def _check_event(self, event: Event) -> AppendResult | None:
        ts_ms = event.origin_server_ts if event.room_version.enforce_key_validity else None

        async def key_of(server: str, key_id: str) -> VerifyKey | None:
            return self._key_of(SigningNeed(ServerName(server), key_id, ts_ms))

        refusal = await check_signatures(event, key_of)
        return None if refusal is None else self._with_failures(event, refusal)

    def _with_failures(self, event: Event, refusal: AppendResult) -> AppendResult:
        """Add to a refusal which servers could not be asked for their keys."""
        failures = [
            f"the keys of {server} cannot be had: {failure}"
            for server in sorted({need.server for need in needs_of(event)})
            if (failure := self._failure_of(server)) is not None
        ]
        return refusal._replace(reason="; ".join([refusal.reason or "", *failures]))

    def _failure_of(self, server: str) -> str | None:
        published = self._keys_of(server)
        return "they were not requested in time" if published is None else published.failure

    def _key_of(self, need: SigningNeed) -> VerifyKey | None:
        published = self._keys_of(need.server)
        return None if published is None else published.at(need.key_id, need.ts_ms)

    def _keys_of(self, server: str) -> PublishedKeys | None:
        return self._own if server == self._own_name else self._published_keys.get(server)

    async def _request(self, needs: Iterable[SigningNeed], seconds: float) -> None:
        """Request the keys that are not known, from several servers at once, for a limited time."""
        needs_by_server: dict[str, list[SigningNeed]] = {}
        for need in needs:
            if self._lacks(need):
                needs_by_server.setdefault(need.server, []).append(need)
        if not needs_by_server:
            return
        turns = asyncio.Semaphore(self._limits.key_servers_at_once)
        end = asyncio.get_running_loop().time() + min(seconds, self._limits.keys_seconds)
        async with asyncio.TaskGroup() as group:
            for server, lacking in needs_by_server.items():
                group.create_task(self._request_in_turn(server, lacking, turns, end))

    async def _request_in_turn(
        self, server: str, needs: list[SigningNeed], turns: asyncio.Semaphore, end: float
    ) -> None:
        async with turns, self._locks.lock(server):
            if not any(map(self._lacks, needs)):
                return
            now = asyncio.get_running_loop().time()
            seconds = min(self._limits.request_seconds, end - now)
            if seconds <= 0:
                return
            published = await self._published(ServerName(server), seconds)
            self._published_keys[server] = published
            self._published_keys.move_to_end(server)
            while len(self._published_keys) > self._limits.key_servers_cached:
                self._published_keys.popitem(last=False)

    async def _published(self, server: ServerName, seconds: float) -> PublishedKeys:
        next_ts = asyncio.get_running_loop().time() + self._limits.key_retry_seconds
        try:
            body = await answer_of(server, seconds, self._remote.server_keys, server)
            return PublishedKeys(read_server_keys(server, body, _now_ms()), next_ts)
        except RemoteError as error:
            before = self._published_keys.get(server)
            kept = {} if before is None else before.keys
            return PublishedKeys(kept, next_ts, str(error))

    def _lacks(self, need: SigningNeed) -> bool:
        """Return whether the key is not known, and its server may be asked now."""
        published = self._keys_of(need.server)
        if published is None:
            return True
        if published.at(need.key_id, need.ts_ms) is not None:
            return False
        return asyncio.get_running_loop().time() >= published.next_ts


def needs_of(event: Event) -> Iterable[SigningNeed]:
    """Yield the keys with which the signatures of an event can be checked."""
    ts_ms = event.origin_server_ts if event.room_version.enforce_key_validity else None
    for server in required_signers(event):
        for key_id in _key_ids(event.json, server):
            yield SigningNeed(server, key_id, ts_ms)


def _work(event: Event) -> int:
    """Return the bytes that are read to check an event: once for each signature."""
    return len(event.raw) + len(list(needs_of(event))[:SIGNATURES_MAX]) * SIGNATURE_BYTES


def _key_ids(signed: JsonObject, server: str) -> Iterable[str]:
    signatures = signed.get("signatures")
    by_server = signatures.get(server) if isinstance(signatures, dict) else None
    return by_server if isinstance(by_server, dict) else ()


def read_server_keys(
    server: ServerName, body: JsonObject, now_ms: int
) -> dict[str, tuple[VerifyKey, int]]:
    """Return the keys in a response of /key/v2/server, each with the last moment it counts for.

    Raise `RemoteError` if the response is of another server, or is not signed with a current key.
    """
    if _is_large(body):
        raise RemoteError(f"the keys have more than {RESPONSE_MAX} characters or values")
    if body.get("server_name") != server:
        raise RemoteError(f"the keys are those of {body.get('server_name')!r}")
    current = _keys_in(body.get("verify_keys"))
    signing = [current[key_id] for key_id in _key_ids(body, server) if key_id in current]
    if not any(_is_signed(body, server, key) for key in signing[:SIGNATURES_MAX]):
        raise RemoteError("the keys are not signed with one of them")
    until = body.get("valid_until_ts")
    if not isinstance(until, int):
        raise RemoteError("the keys have no valid_until_ts")
    until_ms = min(until, now_ms + VALIDITY_MS_MAX)
    retired: Any = body.get("old_verify_keys")
    keys = {
        key_id: (key, expired)
        for key_id, key in _keys_in(retired).items()
        if isinstance(expired := retired[key_id].get("expired_ts"), int)
    }
    return keys | {key_id: (key, until_ms) for key_id, key in current.items()}


def _is_large(body: JsonObject) -> bool:
    """Return whether a response has too many characters or values; look at no more than those."""
    left, waiting = RESPONSE_MAX, list[Any]([body])
    while waiting and left >= 0:
        value = waiting.pop()
        left -= 1 + (len(value) if isinstance(value, str | dict | list) else 0)
        if left >= 0 and isinstance(value, dict | list):
            waiting += value
            waiting += value.values() if isinstance(value, dict) else ()
    return left < 0


def _keys_in(listed: Any) -> dict[str, VerifyKey]:
    """Return the keys of a known algorithm in an object of key ids; skip malformed ones."""
    keys = {}
    for key_id, value in islice(listed.items() if isinstance(listed, dict) else (), KEYS_MAX):
        encoded = value.get("key") if isinstance(value, dict) else None
        if not isinstance(encoded, str) or not is_signing_algorithm_supported(key_id):
            continue
        try:
            keys[key_id] = decode_verify_key_bytes(key_id, decode_base64(encoded))
        except ValueError:  # no base64, or no key: it is as if it was not listed
            continue
    return keys


def _is_signed(body: JsonObject, server: ServerName, key: VerifyKey) -> bool:
    try:
        verify_signed_json(dict(body), server, key)
    except (SignatureVerifyException, TypeError, ValueError, RecursionError):  # or malformed
        return False
    return True


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
