"""The ranges that reads scan for an audience's events, and those around out-of-range events."""

from storage.visibility.multirange import (
    AROUND,
    OUT_OF_RANGE_MAX,
    SLACK,
    expected,
    with_out_of_range,
)


def test_reads_look_from_a_slack_before_the_opening_to_a_slack_after_the_end() -> None:
    assert [expected(order, 500, 900) for order in (399, 400, 700, 1000, 1001)] == [
        False,
        True,
        True,
        True,
        False,
    ]
    assert [expected(order, 500, None) for order in (399, 400, 10**9)] == [False, True, True]
    assert SLACK == 100


def test_a_stray_marks_the_aligned_range_around_it() -> None:
    assert AROUND == 256
    assert with_out_of_range((), 0) == ((0, 256),)
    assert with_out_of_range((), 255) == ((0, 256),)
    assert with_out_of_range((), 256) == ((256, 512),)
    assert with_out_of_range(((256, 512),), 1000) == ((256, 512), (768, 1024))
    assert with_out_of_range(((256, 512),), 512) == ((256, 768),)


def test_a_stray_in_a_marked_range_changes_nothing() -> None:
    out_of_range = ((250, 300),)
    assert with_out_of_range(out_of_range, 250) is out_of_range
    assert with_out_of_range(out_of_range, 299) is out_of_range
    assert with_out_of_range(out_of_range, 300) == ((250, 512),)


def test_the_nearest_ranges_are_joined_where_there_are_too_many() -> None:
    many = tuple(
        (order, order + 1) for order in range(100_000, 100_000 + 1_000 * OUT_OF_RANGE_MAX, 1_000)
    )
    assert len(many) == OUT_OF_RANGE_MAX == 64
    assert with_out_of_range(many, 0) == ((0, 256), (100_000, 101_001), *many[2:])
