"""Bundles wait in files: as they were put, whole, and else an error that names the folder."""

import errno
import io
from pathlib import Path

import pytest

from storage.errors import DatabaseFull, StorageError
from storage.pipeline.imports import bundle_files
from storage.pipeline.imports.bundle_files import (
    FOLDER,
    BundleLocation,
    BundleReader,
    BundleWriter,
    cleared,
)


def test_bundles_of_many_files_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are read in turns, more of them than are kept open."""
    monkeypatch.setattr(bundle_files, "OPEN_MAX", 2)
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
