"""Bundles wait in files: as they were put, whole, and else an error that names the folder."""

import errno
import io
import itertools
import random
from pathlib import Path

import pytest

from storage.errors import DatabaseFull, StorageError
from storage.pipeline.imports import intern_names
from storage.pipeline.imports.intern_names import (
    FOLDER,
    BundleLocation,
    BundleReader,
    BundleWriter,
    cleared,
    neighbours,
)


def test_bundles_of_many_files_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in turns, more of them than are kept open."""
    monkeypatch.setattr(intern_names, "OPEN_MAX", 2)
    cleared(str(tmp_path))
    places: list[tuple[BundleLocation, bytes]] = []
    for number in range(5):
        with BundleWriter(str(tmp_path)) as writer:
            places += [
                (writer.put(data), data) for data in (b"%d" % number * 3, b"", b"-" * 10_000)
            ]
    with BundleReader(str(tmp_path)) as reader:
        for place, data in [*places, *reversed(places), *places[::3]]:
            assert reader.get(place) == data


def test_small_bundles_are_read_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neighbours share a request; one that is large, or beyond the bound, has one of its own."""
    monkeypatch.setattr(intern_names, "UNWANTED_BYTES_MAX", 9)
    monkeypatch.setattr(intern_names, "SMALL_BYTES_MAX", 50)
    cleared(str(tmp_path))
    with BundleWriter(str(tmp_path)) as writer:
        made = [bytes([number]) * 10 for number in range(100)]
        places = [writer.put(data) for data in [*made, b"-" * 51]]
    data_of = dict(zip(places, [*made, b"-" * 51], strict=True))
    wanted = [*places[40:60], *places[:20], places[-1]]
    random.Random(1).shuffle(wanted)
    with BundleReader(str(tmp_path)) as reader:
        reader.fetch(wanted)
        assert reader.requests == 2
        assert [reader.get(place) for place in wanted] == [data_of[place] for place in wanted]
        assert reader.requests == 3
        assert [reader.get(place) for place in places] == list(data_of.values())
        assert reader.requests == 3 + 61
        monkeypatch.setattr(intern_names, "FETCHED_BYTES_MAX", 399)
        reader.fetch(wanted)
        assert reader.requests == 64 + 1


def test_requests_are_bounded() -> None:
    """A request has no more than `REQUEST_BYTES_MAX`, and no more unwanted bytes than allowed."""
    rng = random.Random(2)
    at, places = 0, list[BundleLocation]()
    for _ in range(2_000):
        at += rng.choice([0, 0, 0, 100, 70_000])
        places.append(BundleLocation(rng.choice("ab"), at, rng.randrange(20_000)))
        at += places[-1].length
    requests = list(neighbours(rng.sample(places, len(places))))
    assert sorted(place for some in requests for place in some) == sorted(places)
    for some in requests:
        assert len({place.file for place in some}) == 1
        length = some[-1].start + some[-1].length - some[0].start
        assert length <= intern_names.REQUEST_BYTES_MAX
        for before, after in itertools.pairwise(some):
            assert 0 <= after.start - before.start - before.length <= 64 << 10
    assert len(requests) < len(places) / 2


def test_what_another_import_left_goes(tmp_path: Path) -> None:
    cleared(str(tmp_path))
    with BundleWriter(str(tmp_path)) as writer:
        writer.put(b"old")
    cleared(str(tmp_path))
    assert list((tmp_path / FOLDER).iterdir()) == []


def test_a_bundle_that_is_not_there_or_cut_off(tmp_path: Path) -> None:
    """As if executors see another folder by that name, or one lost its machine while it wrote."""
    cleared(str(tmp_path))
    with BundleWriter(str(tmp_path)) as writer:
        place = writer.put(b"0123456789")
    (tmp_path / FOLDER / place.file).write_bytes(b"01234")
    with BundleReader(str(tmp_path)) as reader:
        with pytest.raises(
            StorageError,
            match=f"{tmp_path}, which all executors must reach, cannot be read: .* ends at 5",
        ):
            reader.get(place)
        with pytest.raises(StorageError, match="cannot be read"):
            reader.get(BundleLocation("another", 0, 1))


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot be written to"):
        cleared(str(tmp_path / "file"))
    with (
        pytest.raises(StorageError, match="cannot be written to"),
        BundleWriter(str(tmp_path / "nothing")),
    ):
        pass


def test_an_error_is_not_hidden_by_that_of_closing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk fails twice: at the last bundle or another error, and when the file closes."""
    cleared(str(tmp_path))

    class Full(io.BytesIO):
        def close(self) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = BundleWriter(str(tmp_path))
    with pytest.raises(DatabaseFull), writer:
        monkeypatch.setattr(writer, "_file", Full())
        raise DatabaseFull("the database's disk is full")
    with pytest.raises(StorageError, match="No space left"), writer:
        monkeypatch.setattr(writer, "_file", Full())
