"""The names a homeserver imports: adding one is a line here, losing one is a break."""

import inspect
import pydoc

import pytest

import storage
import storage.testing

NAMES = """
Aggregations AppendResult ArchiveNotOwned ArchiveRunning ArchiveUnavailable AuthDenied CommitUnknown
Config ConstraintViolated Context DatabaseConflict DatabaseError DatabaseFull DatabaseReplaced
DatabaseUnavailable EventFilter EventId ExtraMissing Gap Hero InputError InstanceNameTaken
InvalidEvent InvalidIdentifier InvalidSignature InvalidToken InvitedRoom JoinedRoom KnockedRoom
LeftRoom MigrationBlocked OpenGap Outbox Outgoing Page PartialRoom PartialState PermissionRefused
ProtocolError PurgeRefused PurgeRunning ReadOnly RelationsPage ReplicaBehind ResyncNeeded RoomId
RoomInfo RoomSubscription RoomSummary SchemaOutOfDate SchemaTooNew SendResult ServerName
SharingChanges SlidingFilter SlidingList SlidingListResult SlidingRoom SlidingSync
SlidingSyncRequest SpaceChild StateIds StateKey StateUnknown StorageClosed StorageCorrupt
StorageError Store StoredEvent Sync SyncFilter ThreadSummary Timeline UnknownEvent UnknownPos
UnknownRoom UnknownRoomVersion UnknownStream UnknownUser Unread UserId WrongServerName __version__
auth event federation open replication responses streams visibility
"""


PACKAGES = (
    storage,
    storage.event,
    storage.federation,
    storage.replication,
    storage.responses,
    storage.streams,
    storage.testing,
    storage.visibility,
)


def test_the_public_names_are_these() -> None:
    assert sorted(storage.__all__) == sorted(NAMES.split())
    assert all(hasattr(storage, name) for name in storage.__all__)


def test_help_on_a_call_shows_its_arguments_and_explains_them() -> None:
    """An open store is not needed: `help` reads the methods of any instance."""
    store = object.__new__(storage.Store)
    calls = [name for name in vars(storage.Store) if not name.startswith("_")]
    assert {"append", "send", "sync", "messages"} <= set(calls)
    for name in calls:
        call = getattr(store, name)
        parameters = inspect.signature(call).parameters
        assert not {"self", "store", "args", "kwargs"} & set(parameters), name
        assert inspect.getdoc(call), name
    for name in ("append", "send", "sync", "messages", "create_room"):
        shown = pydoc.plain(pydoc.render_doc(getattr(store, name)))
        call, _, said = shown.partition("\n    ")
        assert f"{name}({next(iter(parameters_of(store, name)))}" in call
        unsaid = [one for one in parameters_of(store, name) if one not in OBVIOUS | words(said)]
        assert unsaid == [], name


def test_public_names_are_explained() -> None:
    """Inside, a docstring may be left out where the signature says all."""
    for package in PACKAGES:
        for name in package.__all__:
            found = getattr(package, name)
            if inspect.isclass(found) or inspect.isroutine(found):
                assert inspect.getdoc(found), name
            if inspect.isclass(found):
                for part, value in inspect.getmembers(found, inspect.isroutine):
                    own = (getattr(value, "__module__", None) or "").startswith("storage.")
                    assert not own or part.startswith("_") or inspect.getdoc(value), (name, part)


OBVIOUS = {"pdus", "room_id", "user_id", "sender", "creator", "type", "content"}


def test_help_on_open_shows_that_it_is_a_context_manager() -> None:
    shown = pydoc.plain(pydoc.render_doc(storage.open))
    assert "-> contextlib.AbstractAsyncContextManager[storage.store.facade.Store]" in shown
    assert "AsyncIterator" not in shown


def parameters_of(store: storage.Store, name: str) -> list[str]:
    return list(inspect.signature(getattr(store, name)).parameters)


def words(text: str) -> set[str]:
    return set(text.replace("`", " ").replace(",", " ").replace(".", " ").split())


async def test_a_store_that_is_used_before_it_is_open_says_what_to_write() -> None:
    store = storage.open("postgresql://nobody@localhost/none")
    written = r"write `async with storage\.open\(…\) as store:`"
    with pytest.raises(AttributeError, match=f"no 'append': {written}"):
        await store.append([])  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match=f"cannot be awaited: {written}"):
        await store  # type: ignore[misc]
    assert inspect.signature(storage.open).parameters.keys() >= {"dsn", "server_name", "migrate"}
