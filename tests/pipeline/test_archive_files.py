"""The first look at an archive: its number of lines per range, the versions of its new rooms."""

from pathlib import Path

from storage.pipeline.imports.lines import found
from storage.pipeline.imports.validate import scanned_range
from storage.testing import RoomBuilder


def test_lines_are_counted_and_versions_are_those_of_the_create_events(tmp_path: Path) -> None:
    """Lines that are PDUs alone; the words of a create event elsewhere; and no line at all."""
    rooms = [RoomBuilder(version, seed=seed) for seed, version in enumerate(("1", "6", "11"))]
    lines: list[bytes] = [b"", b"not JSON m.room.create"]
    for room in rooms:
        room.start("@alice:s1.test")
        room.message("@alice:s1.test", "m.room.create")
        lines += room.pdus
    file = tmp_path / "rooms.ndjson"
    file.write_bytes(b"\n".join(lines))
    [stretch] = found([str(file)]).ranges(1)
    assert scanned_range(stretch) == (len(lines), {room.room_id: room.version for room in rooms})


def test_of_two_create_events_the_first_counts(tmp_path: Path) -> None:
    room = RoomBuilder("9", seed=1)
    room.start("@alice:s1.test")
    create = room.pdus[0]
    file = tmp_path / "rooms.ndjson"
    file.write_bytes(
        create + b"\n" + create.replace(b'"room_version":"9"', b'"room_version":"8"') + b"\n"
    )
    [stretch] = found([str(file)]).ranges(1)
    assert scanned_range(stretch) == (2, {room.room_id: "9"})


def test_nobody_claims_the_id_of_a_room_of_version_12(tmp_path: Path) -> None:
    room, other = RoomBuilder("12", seed=1), RoomBuilder("9", seed=2)
    for one in (room, other):
        one.start("@alice:s1.test")
    claim = other.pdus[0].replace(other.room_id.encode(), room.room_id.encode())
    file = tmp_path / "rooms.ndjson"
    file.write_bytes(b"\n".join([claim, room.pdus[0], claim]))
    [stretch] = found([str(file)]).ranges(1)
    assert scanned_range(stretch) == (3, {room.room_id: "12"})
