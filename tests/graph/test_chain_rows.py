"""A position in the chain cover as a row, by hand."""

from storage.graph.chains import ChainColumns, ChainEntry, ChainPosition, chain_columns, links_of

JOIN = ChainEntry(ChainPosition(-900, 1), {-870: 2})


def test_the_first_event_of_a_chain_is_found_by_its_number() -> None:
    assert chain_columns(900, JOIN) == (
        ChainColumns(900, None, 1, 30 << 32 | 2, None),
        [],
    )
    later = ChainEntry(ChainPosition(-900, 2), {})
    assert chain_columns(905, later) == (
        ChainColumns(905, -900, 2, None, None),
        [],
    )


def test_links_are_read_as_they_were_written() -> None:
    # the target of the second came later than the event that names it, as a missing parent may
    entry = ChainEntry(ChainPosition(-900, 1), {-870: 2, -907: 5})
    columns, others = chain_columns(900, entry)
    assert others == []
    assert links_of(900, columns[-2:]) == [ChainPosition(-870, 2), ChainPosition(-907, 5)]


def test_other_links_are_rows() -> None:
    targets = {-1: 1, -(2**40): 7, -870: 2, -871: 3, -872: 4}
    columns, others = chain_columns(900, ChainEntry(ChainPosition(-900, 1), targets))
    assert links_of(900, columns[-2:]) == [ChainPosition(-1, 1), ChainPosition(-870, 2)]
    assert others == [
        (-900, 1, -(2**40), 7),
        (-900, 1, -871, 3),
        (-900, 1, -872, 4),
    ]
