"""The chain cover by hand: begin or continue a chain, which links an event needs, its reach."""

from storage.graph.chains import (
    Chain,
    ChainEntry,
    ChainParent,
    ChainPosition,
    Closure,
    closure_of,
    enter,
    extended,
    reaches,
)
from storage.persistent_map import Map

CREATE, POWER = ChainPosition(1, 1), ChainPosition(2, 1)


def test_the_first_event_begins_a_chain() -> None:
    assert enter(None, None, 5, []) == ChainEntry(ChainPosition(5, 1), {})


def test_an_event_continues_the_chain_that_ends_with_its_predecessor() -> None:
    assert enter(POWER, Chain(1, {}), 5, [ChainParent(20, POWER, [])]) == ChainEntry(
        ChainPosition(2, 2), {}
    )
    assert enter(ChainPosition(2, 7), Chain(7, {}), 5, []) == ChainEntry(ChainPosition(2, 8), {})


def test_an_event_begins_a_chain_where_another_continued_its_predecessors() -> None:
    assert enter(POWER, Chain(2, {}), 5, [ChainParent(20, POWER, [])]) == ChainEntry(
        ChainPosition(5, 1), {2: 1}
    )
    assert enter(POWER, None, 5, [ChainParent(20, POWER, [])]) == ChainEntry(
        ChainPosition(5, 1), {2: 1}
    )
    assert enter(None, Chain(0, {}), 5, []) == ChainEntry(ChainPosition(5, 1), {})


def test_what_a_new_chain_links_is_not_what_the_old_one_links() -> None:
    assert enter(POWER, Chain(3, {1: 1}), 5, [ChainParent(10, CREATE, [])]) == ChainEntry(
        ChainPosition(5, 1), {1: 1}
    )


def test_a_link_leads_to_the_highest_number_of_a_chain() -> None:
    parents = [
        ChainParent(20, ChainPosition(2, 3), []),
        ChainParent(21, ChainPosition(2, 7), []),
        ChainParent(22, ChainPosition(2, 5), []),
    ]
    assert enter(None, None, 5, parents) == ChainEntry(ChainPosition(5, 1), {2: 7})


def test_no_link_leads_to_what_another_auth_event_names() -> None:
    parents = [ChainParent(10, CREATE, []), ChainParent(20, POWER, [10])]
    assert enter(None, None, 5, parents) == ChainEntry(ChainPosition(5, 1), {2: 1})


def test_no_link_says_again_what_the_chain_says() -> None:
    parents = [ChainParent(10, CREATE, []), ChainParent(30, ChainPosition(3, 4), [])]
    assert enter(POWER, Chain(1, {1: 1, 3: 3}), 5, parents) == ChainEntry(
        ChainPosition(2, 2), {3: 4}
    )
    assert enter(POWER, Chain(1, {1: 1, 3: 4}), 5, parents) == ChainEntry(ChainPosition(2, 2), {})


def test_no_link_leads_to_the_own_chain() -> None:
    assert enter(
        ChainPosition(2, 5),
        Chain(5, {}),
        9,
        [ChainParent(20, ChainPosition(2, 5), []), ChainParent(10, CREATE, [])],
    ) == ChainEntry(ChainPosition(2, 6), {1: 1})


def test_a_chain_knows_its_last_number_and_all_its_links() -> None:
    assert extended(None, ChainEntry(ChainPosition(5, 1), {2: 1})) == Chain(1, {2: 1})
    assert extended(Chain(1, {2: 1, 3: 1}), ChainEntry(ChainPosition(5, 2), {3: 4})) == Chain(
        2, {2: 1, 3: 4}
    )


def test_an_event_reaches_the_earlier_places_of_the_chains_that_it_reaches() -> None:
    closure: Closure = Map({2: 3})
    assert [reaches(closure, ChainPosition(2, number)) for number in (1, 3, 4)] == [
        True,
        True,
        False,
    ]
    assert not reaches(closure, ChainPosition(1, 1))


def test_the_closure_holds_the_auth_events_and_what_they_reach() -> None:
    create: Closure = Map()
    power: Closure = Map({1: 1})
    assert closure_of([]) == Map()
    assert closure_of([(CREATE, create)]) == Map({1: 1})
    assert closure_of([(CREATE, create), (POWER, power)]) == Map({1: 1, 2: 1})
    joined = closure_of(
        [(ChainPosition(3, 4), Map({1: 1, 2: 5})), (ChainPosition(4, 2), Map({1: 1, 2: 6, 5: 1}))]
    )
    assert joined == Map({1: 1, 2: 6, 3: 4, 4: 2, 5: 1})


def test_the_closure_takes_the_highest_number_of_each_chain() -> None:
    assert closure_of(
        [(ChainPosition(3, 1), Map({2: 5, 9: 1})), (ChainPosition(4, 1), Map({2: 3}))]
    ) == Map({2: 5, 3: 1, 4: 1, 9: 1})
    assert closure_of(
        [(ChainPosition(3, 2), Map({2: 5, 9: 1})), (ChainPosition(3, 4), Map({7: 3}))]
    ) == Map({2: 5, 3: 4, 7: 3, 9: 1})
    low, high = (ChainPosition(3, 1), Map({2: 5})), (ChainPosition(4, 1), Map({2: 7}))
    assert closure_of([low, high]) == closure_of([high, low]) == Map({2: 7, 3: 1, 4: 1})


def test_a_chain_comes_back_from_its_numbers() -> None:
    for links in ({}, {7: 1}, {7: 1, -20: 3, 9: 2}):
        chain = Chain(4, links)
        assert Chain.from_numbers(chain.numbers()) == chain
        assert all(type(number) is int for number in chain.numbers())
