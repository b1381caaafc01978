"""Every public call of `storage.federation` with values of wrong types: a typed error, or a result.

Each argument of each call is replaced by each wrong value, while the others are right.
"""

import inspect
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from storage import InputError, StorageError
from storage.federation import (
    HttpRemote,
    Memberships,
    ReceiverLimits,
    RemoteError,
    Responder,
    Sender,
    SenderLimits,
    published_keys,
)
from storage.testing import signing_key
from tests.federation.peers import Homeserver
from tests.federation.rooms import shared_room

WRONG: Final[tuple[Any, ...]] = (
    None,
    True,
    7,
    -1,
    1.5,
    float("nan"),
    b"bytes",
    "",
    "text",
    "nul\0",
    "\ud800",
    [],
    [7],
    [None],
    [[]],
    ["text"],
    {},
    {"a": 7},
    {7: []},
    {"pdus": 7, "event": 7, "room_version": [], "limit": "x", "min_depth": []},
    {"pdus": [7], "event": {}, "room_version": "12", "earliest_events": [7]},
    {"pdus": [{"room_id": 7}], "event": {"content": []}, "latest_events": [None]},
    {"signatures": [], "state": [7], "auth_chain": {}},
    object(),
)
LONG_RUNNING: Final = {"run"}


class Subjects:
    """The objects of the second of two servers, and right values for each parameter."""

    def __init__(self, other: Homeserver, values: dict[str, Any]) -> None:
        async def send(*_: Any) -> None:
            """Take each transaction."""

        async def request(*_: Any) -> tuple[int, Any]:
            return 404, {}

        self.values = values
        receiver = other.receiver
        self.objects: list[object] = [
            receiver,
            Memberships(receiver, other.remote),
            Responder(receiver, Sender(other.store, send)),
            Sender(other.store, send),
            HttpRemote(other.name, signing_key(other.name), request),
        ]

    def calls(self) -> Iterator[tuple[str, Callable[..., Any]]]:
        """Every public method."""
        for subject in self.objects:
            for name, found in vars(type(subject)).items():
                if inspect.isfunction(found) and name[0] != "_" and name not in LONG_RUNNING:
                    yield f"{type(subject).__name__}.{name}", getattr(subject, name)


async def subjects(servers: list[Homeserver]) -> Subjects:
    one, other = servers
    room_id = await shared_room(one, other)
    said = await one.say(room_id, "hello")
    [event_id] = await other.receive(one, [said])
    stored = await other.store.event(event_id)
    values: dict[str, Any] = {
        "server": one.name,
        "servers": [one.name],
        "origin": one.name,
        "signed": {"signatures": {}},
        "method": "GET",
        "uri": "/path",
        "authorization": f'X-Matrix origin="{one.name}",key="ed25519:1",sig="AAAA"',
        "content": {},
        "room_id": room_id,
        "pdus": [said],
        "pdu": said,
        "join_pdu": said,
        "response": {"state": [], "auth_chain": []},
        "room_version": "12",
        "stripped_state": [],
        "limit": 1,
        "user_id": other.user("guest"),
        "sender": other.user(),
        "body": {"pdus": [said]},
        "change": "join",
        "versions": ["12"],
        "event_id": event_id,
        "event_ids": [event_id],
        "omit_members": False,
        "timestamp_ms": 1,
        "direction": "b",
        "event": stored,
        "earliest": [event_id],
        "latest": [event_id],
        "min_depth": 0,
        "transaction_id": "1",
        "events": [stored],
    }
    return Subjects(other, values)


async def outcome(call: Callable[..., Any], given: dict[str, Any]) -> object:
    """Return the result or the typed error of a call; raise any other error."""
    try:
        found = call(**given)
        return await found if inspect.isawaitable(found) else found
    except (StorageError, RemoteError) as error:
        return error


@pytest.mark.timeout(300)
async def test_a_wrong_type_is_a_typed_error(two: list[Homeserver]) -> None:
    world = await subjects(two)
    faults = []
    for name, call in world.calls():
        right = {key: world.values[key] for key in inspect.signature(call).parameters}
        await outcome(call, right)
        for key in right:
            for wrong in WRONG:
                try:
                    await outcome(call, right | {key: wrong})
                except Exception as error:  # noqa: BLE001  # each is a fault, all are listed
                    faults.append(f"{name}({key}={wrong!r}): {error!r}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize("limits", [ReceiverLimits, SenderLimits])
@pytest.mark.parametrize("wrong", ["1", None, [], True, 0, -1, float("nan")])
def test_limits_are_positive_numbers(limits: type[Any], wrong: Any) -> None:
    for name in limits.__dataclass_fields__:
        with pytest.raises(InputError, match=name):
            limits(**{name: wrong})


@pytest.mark.parametrize("wrong", WRONG)
def test_keys_are_published_for_a_name_and_a_key(wrong: Any) -> None:
    key = signing_key("s1.test")
    for arguments in ((wrong, key), ("s1.test", wrong)):
        if arguments[0] != "text":
            with pytest.raises(InputError):
                published_keys(*arguments)


async def test_the_named_calls_raise_input_errors(two: list[Homeserver]) -> None:
    one, other = two
    receiver = other.receiver
    join = await other.make_join(await shared_room(one, other), one, "guest")
    for refused in (
        lambda: receiver.check_request("GET", "/", True, None),  # type: ignore[arg-type]
        lambda: receiver.check_request([], "/", None, None),  # type: ignore[arg-type]
        lambda: receiver.check_request("GET", "/", None, [7]),  # type: ignore[arg-type]
        lambda: receiver.joined(one.name, join, {}, []),  # type: ignore[arg-type]
        lambda: receiver.accepted(one.name, join, []),  # type: ignore[arg-type]
        lambda: receiver.invited(join, []),  # type: ignore[arg-type]
    ):
        with pytest.raises(InputError):
            await refused()
