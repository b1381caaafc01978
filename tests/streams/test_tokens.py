"""Tokens: a printed token parses back, anything else is refused.

Sync tokens are ordered as their positions are.
"""

import string
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import InvalidToken
from storage.streams import PaginationToken, RoomsToken, SyncToken, VectorPosition
from storage.streams.tokens import LARGEST_TOKEN, CursorPosition, deployment_mark

HERE = "deployment-one"
names = st.text(min_size=1, max_size=6)
stream_ids = st.integers(0, 2**63 - 1)
vectors = st.builds(VectorPosition.of, stream_ids, st.dictionaries(names, stream_ids, max_size=3))
sync_tokens = st.builds(SyncToken.of, st.dictionaries(names, vectors, max_size=3))
pagination_tokens = st.builds(PaginationToken, stream_ids, stream_ids) | st.builds(
    PaginationToken, stream_ids, stream_ids, stream_ids
)
rooms_tokens = st.builds(RoomsToken, sync_tokens, stream_ids, stream_ids)
small_vectors = st.builds(
    VectorPosition.of, st.integers(0, 3), st.dictionaries(st.sampled_from("ab"), st.integers(0, 5))
)
small_tokens = st.builds(
    SyncToken.of, st.dictionaries(st.sampled_from(["events", "receipts"]), small_vectors)
)


def readable(text: str) -> bool:
    for kind in (SyncToken, PaginationToken, RoomsToken):
        try:
            kind.parse(text, HERE)
        except InvalidToken:
            continue
        return True
    return False


@given(sync_tokens, pagination_tokens, rooms_tokens)
def test_round_trip(sync: SyncToken, pagination: PaginationToken, rooms: RoomsToken) -> None:
    assert SyncToken.parse(sync.print(HERE), HERE) == sync
    assert PaginationToken.parse(pagination.print(HERE), HERE) == pagination
    assert RoomsToken.parse(rooms.print(HERE), HERE) == rooms


@given(sync_tokens)
def test_a_token_needs_no_quoting_in_a_url(token: SyncToken) -> None:
    assert quote(token.print(HERE), safe="") == token.print(HERE)


@given(st.one_of(sync_tokens, pagination_tokens, rooms_tokens), st.data())
def test_any_damaged_character_is_refused(
    token: SyncToken | PaginationToken | RoomsToken, data: st.DataObject
) -> None:
    text = token.print(HERE)
    place = data.draw(st.integers(0, len(text) - 1))
    for other in (string.printable + "\x00\xe9\u0663\ud800").replace(text[place], ""):
        assert not readable(text[:place] + other + text[place + 1 :])


@given(st.one_of(sync_tokens, pagination_tokens, rooms_tokens), st.data())
def test_lost_doubled_and_swapped_characters_are_refused(
    token: SyncToken | PaginationToken | RoomsToken, data: st.DataObject
) -> None:
    text = token.print(HERE)
    place = data.draw(st.integers(0, len(text) - 2))
    assert not readable(text[:place] + text[place + 1 :])
    assert not readable(text[:place] + text[place] + text[place:])
    swapped = text[:place] + text[place + 1] + text[place] + text[place + 2 :]
    assert swapped == text or not readable(swapped)
    assert not readable(text[:place])


@given(st.text())
def test_any_text_gives_a_token_or_an_invalid_token_error(text: str) -> None:
    assert not readable(text)


@given(small_tokens, small_tokens, small_tokens)
def test_order_laws(one: SyncToken, other: SyncToken, third: SyncToken) -> None:
    assert one <= one
    assert not one < one
    if one <= other and other <= third:
        assert one <= third
    if one <= other and other <= one:
        assert not one < other
        assert not other < one
    assert (one < other) == (one <= other and not other <= one)
    assert (one >= other) == (other <= one)
    assert (one > other) == (other < one)


@given(small_tokens, st.sampled_from(["events", "receipts", "new"]), small_vectors)
def test_advance_goes_forward_and_covers_the_position(
    token: SyncToken, stream: str, position: VectorPosition
) -> None:
    advanced = token.advance(stream, position)
    assert token <= advanced
    reached = advanced.position(stream)
    assert reached is not None
    assert position <= reached
    assert advanced.advance(stream, position) == advanced


@given(small_tokens, small_tokens)
def test_a_future_token_is_bounded_by_the_current_positions(
    token: SyncToken, current: SyncToken
) -> None:
    bounded = token.bound(current.positions())
    assert bounded <= token
    assert bounded <= current
    assert bounded.bound(current.positions()) == bounded
    if token <= current and set(token.positions()) <= set(current.positions()):
        assert bounded == token


@given(pagination_tokens, pagination_tokens)
def test_pagination_tokens_are_in_topological_order_then_stream_order(
    one: PaginationToken, other: PaginationToken
) -> None:
    assert (one < other) == (
        (one.topological, one.stream, one.live) < (other.topological, other.stream, other.live)
    )
    assert (one <= other) == (one < other or one == other)


def test_the_printed_forms_stay_as_they_are() -> None:
    """Clients keep tokens for months: a changed form needs a new version and a second case here."""
    token = SyncToken.of(
        {
            "account_data": VectorPosition(7),
            "events": VectorPosition(53, (("main", 60), ("w-2", 71))),
        }
    )
    mark = deployment_mark(HERE)
    assert token.print(HERE) == f"s1~{mark}~account__data.7~events.53.main-60.w_2D_2-71~889d2b9c"
    assert PaginationToken(120, 4711).print(HERE) == f"p1~{mark}~120.4711~e386f3d4"
    assert PaginationToken(120, 4711, 900).print(HERE) == f"p1~{mark}~120.4711.900~f9e2b019"
    beside = PaginationToken(120, 4711, 900, 2, "f", (CursorPosition(130, 4712, 1),))
    assert beside.print(HERE) == f"p1~{mark}~120.4711.900~2~f130.4712.1~e82e84d1"
    assert PaginationToken.parse(beside.print(HERE), HERE) == beside
    upto = SyncToken.of({"events": VectorPosition(53, (("main", 60),))})
    assert RoomsToken(upto, 4711, 7).print(HERE) == f"r1~{mark}~4711.7~events.53.main-60~06b278b4"
    assert SyncToken().print(HERE).startswith(f"s1~{mark}~~")


def forged(head: str) -> str:
    """A token whose checksum is right, so that the checks behind it are reached."""
    from storage.streams.tokens import _checksum  # noqa: PLC0415

    return f"{head}~{_checksum(head)}"


MARK = deployment_mark(HERE)


@pytest.mark.parametrize(
    "text, reason",
    [
        ("", "damaged"),
        ("s1~~~", "damaged"),
        ("x" * (LARGEST_TOKEN + 1), "more than"),
        (forged(f"s2~{MARK}~events.1"), "version is '2'"),
        (forged(f"p1~{MARK}~1.2"), "it is a pagination token, where a sync token is needed"),
        (forged(f"q1~{MARK}~1.2"), "it is a strange token"),
        (forged("s1~deadbeef~events.1"), "another deployment"),
        (forged("s1"), "another deployment"),
        (forged(f"s1~{MARK}~events"), "'' is not a position"),
        (forged(f"s1~{MARK}~events.one"), "'one' is not a position"),
        (forged(f"s1~{MARK}~events.-1"), "'-1' is not a position"),
        (forged(f"s1~{MARK}~events.01"), "'01' is not a position"),
        (forged(f"s1~{MARK}~events.9223372036854775808"), "not a stream position"),
        (forged(f"s1~{MARK}~events.5.main-5"), "not above min"),
        (forged(f"s1~{MARK}~events.5.main-7.main-8"), "distinct"),
        (forged(f"s1~{MARK}~events.5.main"), "'' is not a position"),
        (forged(f"s1~{MARK}~receipts.5~events.5"), "sorted"),
        (forged(f"s1~{MARK}~account_5F_data.5"), "normal form"),
        (forged(f"s1~{MARK}~_FFFFFFFFFFFF_.5"), "normal form"),
        (forged(f"s1~{MARK}~_110000_.5"), "normal form"),
    ],
)
def test_a_refused_token_says_why(text: str, reason: str) -> None:
    with pytest.raises(InvalidToken) as caught:
        SyncToken.parse(text, HERE)
    assert reason in caught.value.reason
    assert caught.value.token == text[:LARGEST_TOKEN]


def test_a_token_that_was_read_lately_is_refused_elsewhere_all_the_same() -> None:
    text = SyncToken.of({"events": VectorPosition(5)}).print(HERE)
    assert SyncToken.parse(text, HERE) is SyncToken.parse(text, HERE)  # not read again
    with pytest.raises(InvalidToken, match="another deployment"):
        SyncToken.parse(text, "deployment-two")


def test_a_token_of_another_deployment_is_refused() -> None:
    text = SyncToken.of({"events": VectorPosition(5)}).print("deployment-two")
    with pytest.raises(InvalidToken, match="another deployment"):
        SyncToken.parse(text, HERE)


def test_a_stream_that_came_with_an_upgrade_is_not_in_an_old_token() -> None:
    old = SyncToken.of({"events": VectorPosition(5)})
    assert old.position("threads") is None
    assert old.advance("threads", VectorPosition(9)).position("threads") == VectorPosition(9)


@pytest.mark.parametrize("topological, stream", [(-1, 0), (0, -1), (2**63, 0), (0, 2**63)])
def test_a_place_has_bigint_orderings(topological: int, stream: int) -> None:
    with pytest.raises(ValueError, match="not an ordering"):
        PaginationToken(topological, stream)
