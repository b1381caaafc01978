"""The numbers of audiences: three kinds of lines, by hand.

The main line has no end; a branch and a sub-branch do.
"""

import pytest

from storage.visibility.multirange import (
    FIRST,
    NOTHING,
    AudienceNumber,
    branching,
    depth,
    following,
    line_end,
    main,
)

MAIN = 1 << 40  # distance of neighbours on the main line
BRANCH = 1 << 24  # length of a branch
STEP = 1 << 12  # distance of neighbours on a branch
SUB = 1 << 6  # length of a sub-branch


def test_the_first_number_is_one_unit_and_nobody_is_in_nothing() -> None:
    assert (FIRST, NOTHING) == (MAIN, 0)


@pytest.mark.parametrize(
    "number,on_main,kind,end",
    [
        (MAIN, MAIN, 0, None),
        (7 * MAIN, 7 * MAIN, 0, None),
        (MAIN + BRANCH, MAIN, 1, MAIN + 2 * BRANCH),
        (MAIN + BRANCH + 3 * STEP, MAIN, 1, MAIN + 2 * BRANCH),
        (3 * MAIN + BRANCH + STEP + SUB, 3 * MAIN, 2, 3 * MAIN + BRANCH + STEP + 2 * SUB),
        (3 * MAIN + BRANCH + STEP + SUB + 5, 3 * MAIN, 2, 3 * MAIN + BRANCH + STEP + 2 * SUB),
    ],
)
def test_the_line_of_a_number(number: int, on_main: int, kind: int, end: int | None) -> None:
    assert (main(number), depth(number), line_end(number)) == (on_main, kind, end)


def test_the_next_number_on_a_line() -> None:
    assert following(MAIN) == AudienceNumber(2 * MAIN, None)
    assert following(MAIN + BRANCH) == AudienceNumber(MAIN + BRANCH + STEP, MAIN + 2 * BRANCH)
    assert following(MAIN + BRANCH + STEP + SUB) == AudienceNumber(
        MAIN + BRANCH + STEP + SUB + 1, MAIN + BRANCH + STEP + 2 * SUB
    )


def test_a_line_is_full_after_its_last_number() -> None:
    last = MAIN + 2 * BRANCH - STEP
    assert following(last - STEP) == AudienceNumber(last, MAIN + 2 * BRANCH)
    assert following(last) is None
    assert following(MAIN + BRANCH + STEP + 2 * SUB - 1) is None


def test_the_first_number_of_a_new_line() -> None:
    assert branching(MAIN, 0) == AudienceNumber(MAIN + BRANCH, MAIN + 2 * BRANCH)
    assert branching(MAIN, 4) == AudienceNumber(MAIN + 5 * BRANCH, MAIN + 6 * BRANCH)
    at = MAIN + BRANCH + STEP
    assert branching(at, 0) == AudienceNumber(at + SUB, at + 2 * SUB)
    assert branching(at, 1) == AudienceNumber(at + 2 * SUB, at + 3 * SUB)


def test_65535_lines_leave_from_a_number_of_the_main_line_and_63_from_one_of_a_branch() -> None:
    assert branching(MAIN, 65_534) == AudienceNumber(2 * MAIN - BRANCH, 2 * MAIN)
    assert branching(MAIN, 65_535) is None
    at = MAIN + BRANCH + STEP
    assert branching(at, 62) == AudienceNumber(at + STEP - SUB, at + STEP)
    assert branching(at, 63) is None


def test_no_line_leaves_from_a_sub_branch() -> None:
    assert branching(MAIN + BRANCH + STEP + SUB, 0) is None
