"""Gaps that restores leave in a stream: refused tokens, and where writers' positions continue.

Without a database.
"""

import pytest

from storage.errors import ResyncNeeded
from storage.streams.positions import VectorPosition
from storage.streams.restore_detection import JUMP, LostPositions, RestoreGap

UPTO = 101 + JUMP
FIRST = RestoreGap.of(101, UPTO, ["a", "b"], [60, 101])
SECOND = RestoreGap.of(UPTO + 9, UPTO + 9 + JUMP, ["a", "b", "c"], [60, UPTO + 9, UPTO])
LOST = LostPositions((FIRST, SECOND))
"""Twice, and a has written nothing since the first time."""


def at(minimum: int, **writers: int) -> VectorPosition:
    return VectorPosition.of(minimum, writers)


@pytest.mark.parametrize(
    "position",
    [
        at(60),
        at(40, b=101),
        at(60, b=101),
        at(60, b=UPTO),
        at(60, b=UPTO + 9),
        at(60, b=UPTO + 9, c=UPTO),
        at(UPTO + 9 + JUMP),
        at(60, b=UPTO + 10 + JUMP),
    ],
)
def test_a_token_of_what_was_kept_goes_on(position: VectorPosition) -> None:
    LOST.refuse("token", position)
    assert LOST.outside(position) == position


@pytest.mark.parametrize(
    "position",
    [
        at(60, a=61),
        at(100, b=101),
        at(60, b=102),
        at(61),
        at(101),
        at(60, b=101, c=102),
        at(60, b=UPTO + 10),
        at(60, c=UPTO + 1),
        at(UPTO),
    ],
)
def test_a_token_that_may_cover_what_is_lost_is_refused(position: VectorPosition) -> None:
    with pytest.raises(ResyncNeeded, match="restored from"):
        LOST.refuse("token", position)


def test_a_gap_without_writers_begins_at_one_place() -> None:
    """As code of before left it."""
    lost = LostPositions((RestoreGap.of(101, UPTO, [], []),))
    for position in (at(101), at(60, b=101), at(UPTO)):
        lost.refuse("token", position)
        assert lost.outside(position) == position
    for position in (at(102), at(60, b=102), at(UPTO - 1)):
        with pytest.raises(ResyncNeeded):
            lost.refuse("token", position)
    assert lost.outside(at(102)) == at(101)


def test_a_writer_inside_its_gap() -> None:
    assert [LOST.before("a", position) for position in (60, 61, UPTO, UPTO + 9 + JUMP)] == [
        60,
        60,
        60,
        UPTO + 9 + JUMP,
    ]
    assert [LOST.holds("a", position) for position in (60, 61, UPTO, UPTO + 9 + JUMP)] == [
        False,
        True,
        True,
        False,
    ]
    assert [LOST.before("b", position) for position in (101, 102, UPTO)] == [101, 101, UPTO]
    assert [LOST.holds("b", position) for position in (101, 102, UPTO)] == [False, True, False]
    assert LOST.before("new", 102) == 101
    assert LOST.holds("new", 102)


def test_what_is_covered_stays_covered_outside_of_gaps() -> None:
    """A read of the past goes on position by position, also where a writer has a gap.

    No other writer goes back.
    """
    assert LOST.outside(at(80)) == at(60, b=80, c=80)
    assert LOST.outside(at(101)) == at(60, b=101, c=101)
    assert LOST.outside(at(101, b=UPTO + 3)) == at(60, b=UPTO + 3, c=101)
