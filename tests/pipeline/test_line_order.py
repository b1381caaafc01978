"""The order of a room's lines: each after what it needs, and as they stand where that can be."""

import codecs
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.pipeline.imports import lines as archive_lines
from storage.pipeline.imports.lines import (
    LINE_BYTES_MAX,
    FileRange,
    LineWithoutPdu,
    lines_of,
    lines_with,
    order,
)


def test_causal_lines_stay_as_they_are() -> None:
    assert (
        order(
            [
                LineWithoutPdu("a", False, []),
                LineWithoutPdu("b", False, ["a", "^a"]),
                LineWithoutPdu("c", False, ["unknown", "^b"]),
            ]
        )
        is None
    )


def test_a_line_waits_for_what_it_needs_and_no_longer() -> None:
    lines = [
        LineWithoutPdu("c", False, ["^b"]),
        LineWithoutPdu("x", False, []),
        LineWithoutPdu("b", False, ["^a"]),
        LineWithoutPdu("a", False, []),
    ]
    assert order(lines) == [1, 3, 2, 0]


def test_an_outlier_is_no_parent() -> None:
    """The child of an outlier waits for the line that brings it into the timeline.

    As an auth event the outlier is enough.
    """
    lines = [
        LineWithoutPdu("a", True, []),
        LineWithoutPdu("b", False, ["^a"]),
        LineWithoutPdu("c", False, ["a"]),
        LineWithoutPdu("a", False, []),
    ]
    assert order(lines) == [0, 2, 3, 1]


def test_lines_of_one_event_keep_their_order() -> None:
    assert order(
        [
            LineWithoutPdu("a", True, ["z"]),
            LineWithoutPdu("a", False, []),
            LineWithoutPdu("z", False, []),
        ]
    ) == [2, 0, 1]


def test_in_a_circle_the_first_goes_ahead() -> None:
    assert order([LineWithoutPdu("a", False, ["b"]), LineWithoutPdu("b", False, ["a"])]) == [0, 1]


@given(
    lines=st.lists(st.binary(max_size=12).map(lambda line: line.replace(b"\n", b"-")), max_size=8),
    size=st.integers(1, 20),
    piece=st.integers(1, 40),
    ended=st.booleans(),
)
def test_stretches_of_a_file_have_each_line_once(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int, piece: int, ended: bool
) -> None:
    file: Path = tmp_path_factory.mktemp("lines") / "file"
    whole = b"\n".join(lines) + (b"\n" if ended and lines else b"")
    file.write_bytes(whole)
    stretches = [
        FileRange("lines", 0, 0, 0, str(file), begin, min(begin + size, len(whole)))
        for begin in range(0, len(whole), size)
    ]
    expected = whole.split(b"\n")
    expected = expected if expected[-1] else expected[:-1]
    expected = [
        line if at else line.removeprefix(codecs.BOM_UTF8) for at, line in enumerate(expected)
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(archive_lines, "PIECE_BYTES", piece)
        for stretch in stretches:
            read = list(lines_of(stretch))
            assert read == expected[: len(read)]
            del expected[: len(read)]
            assert lines_with(stretch, b"\0") == (
                len(read),
                [line for line in read if b"\0" in line],
            )
    assert expected == []
    assert LINE_BYTES_MAX > 12
