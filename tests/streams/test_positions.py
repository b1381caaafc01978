"""Vector positions are a lattice of sets of facts: each operation is compared with the sets."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.streams import VectorPosition

WRITERS = ["a", "b", "c", "d"]
IDS = range(8)
positions = st.builds(
    VectorPosition.of,
    st.integers(0, 6),
    st.dictionaries(st.sampled_from(WRITERS[:3]), st.integers(0, 7)),
)  # writer d is never listed: it stands for a writer that nobody has heard of


def facts(position: VectorPosition) -> set[tuple[str, int]]:
    return {
        (writer, stream_id)
        for writer in WRITERS
        for stream_id in IDS
        if position.covers(writer, stream_id)
    }


@given(positions, positions)
def test_the_order_is_inclusion_of_facts(one: VectorPosition, other: VectorPosition) -> None:
    assert (one <= other) == (facts(one) <= facts(other))
    assert (one < other) == (facts(one) < facts(other))
    assert (one >= other) == (facts(one) >= facts(other))
    assert (one > other) == (facts(one) > facts(other))
    assert (one == other) == (facts(one) == facts(other))


@given(positions, positions)
def test_merge_is_union_and_meet_is_intersection(
    one: VectorPosition, other: VectorPosition
) -> None:
    assert facts(one.merge(other)) == facts(one) | facts(other)
    assert facts(one.meet(other)) == facts(one) & facts(other)


@given(positions, st.sampled_from(WRITERS), st.sampled_from(IDS))
def test_advance_adds_the_facts_of_one_writer(
    position: VectorPosition, writer: str, stream_id: int
) -> None:
    assert facts(position.advance(writer, stream_id)) == facts(position) | {
        (writer, earlier) for earlier in IDS if earlier <= stream_id
    }


@given(positions)
def test_linear_and_furthest_bound_the_facts(position: VectorPosition) -> None:
    covered = facts(position)
    assert {
        (writer, stream_id) for writer in WRITERS for stream_id in range(position.linear() + 1)
    } <= covered
    assert max(stream_id for _, stream_id in covered) == position.furthest()


def test_two_positions_may_be_incomparable() -> None:
    one, other = VectorPosition(1, (("a", 5),)), VectorPosition(1, (("b", 5),))
    assert not one <= other
    assert not other <= one


@pytest.mark.parametrize(
    "minimum, items",
    [
        (-1, ()),
        (2**63, ()),
        (3, (("a", 3),)),
        (3, (("a", 2**63),)),
        (3, (("b", 5), ("a", 5))),
        (3, (("a", 5), ("a", 6))),
    ],
    ids=["negative", "too large", "not above min", "writer too large", "not sorted", "twice"],
)
def test_only_the_normal_form_can_be_built(
    minimum: int, items: tuple[tuple[str, int], ...]
) -> None:
    with pytest.raises(ValueError, match=r"position|sorted"):
        VectorPosition(minimum, items)
