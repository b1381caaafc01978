"""The tree of errors: drawn, documented, picklable."""

import inspect
import pickle
import re

import pytest

from storage import errors
from storage.errors import StorageError

SAMPLES: list[StorageError] = [
    errors.InvalidEvent("too long", event_id="$a"),
    errors.InvalidSignature("missing", event_id="$a", server_name="b", key_id="ed25519:1"),
    errors.AuthDenied("@a:b is banned", rule="member.join.banned", event_id="$a"),
    errors.UnknownRoomVersion("99"),
    errors.InvalidIdentifier("x", "no sigil"),
    errors.UnknownRoom("!a:b"),
    errors.UnknownEvent("$a"),
    errors.UnknownUser("@a:b"),
    errors.StateUnknown("$a"),
    errors.PartialState("!r:s"),
    errors.InvalidToken("t", "damaged"),
    errors.UnknownPos("t", "expired"),
    errors.WrongServerName("s2.test", found="s1.test"),
    errors.ExtraMissing("tracing", "tracing"),
    errors.ResyncNeeded("t", "too old"),
    errors.ArchiveRunning(),
    errors.ArchiveNotOwned("/srv/rooms", owner="1.2 rooms", database="1.3 copy"),
    errors.ArchiveUnavailable("no space", url="/srv/rooms"),
    errors.PurgeRunning("a purge is under way", room_id="!r:s"),
    errors.ProtocolError("no such command", line="X"),
    errors.DatabaseUnavailable("refused"),
    errors.DatabaseReplaced("a standby took over"),
    errors.DatabaseFull("disk", sqlstate="53100"),
    errors.DatabaseConflict("deadlock", sqlstate="40P01"),
    errors.CommitUnknown("lost"),
    errors.InstanceNameTaken("main", sqlstate="RS002"),
    errors.PermissionRefused("events", sqlstate="42501"),
    errors.ConstraintViolated("row", constraint="events_pkey", sqlstate="23505"),
    errors.SchemaOutOfDate(found=None, wanted="3"),
    errors.SchemaOutOfDate(found="1", wanted="3", rewritten=True),
    errors.SchemaTooNew(found="5", wanted="3", needed="4"),
    errors.MigrationBlocked("a job is not done", revision="4"),
    errors.UnknownStream("typing"),
    errors.ReplicaBehind("it has not replayed this"),
    errors.ReadOnly(),
    errors.StorageClosed(),
    errors.StorageCorrupt("child before parent", child=1, parent=2),
]


def classes() -> dict[str, type[StorageError]]:
    return {
        name: value
        for name, value in vars(errors).items()
        if inspect.isclass(value) and issubclass(value, StorageError)
    }


@pytest.mark.parametrize("error", SAMPLES, ids=lambda error: type(error).__name__)
def test_an_error_crosses_a_process_border_unchanged(error: StorageError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert vars(copy) == vars(error)
    assert vars(error)


def test_every_class_stands_in_the_drawn_tree_below_its_parent() -> None:
    path: list[str] = []
    drawn = {}
    for line in (errors.__doc__ or "").splitlines():
        if match := re.match(r"([│ ]*)(?:[├└]─ )?([A-Z][A-Za-z]+)(  .*)?$", line):
            depth = 0 if line == "StorageError" else len(match[1]) // 3 + 1
            path[depth:] = [match[2]]
            drawn[match[2]] = path[depth - 1] if depth else "Exception"
    assert drawn == {name: cls.__bases__[0].__name__ for name, cls in classes().items()}


def test_every_class_is_documented_and_every_leaf_is_sampled() -> None:
    assert all(cls.__doc__ for cls in classes().values())
    leaves = {cls for cls in classes().values() if not cls.__subclasses__()}
    assert leaves <= {type(error) for error in SAMPLES}
