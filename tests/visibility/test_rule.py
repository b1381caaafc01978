"""The rule of history visibility, as a table written out by hand from the specification."""

import itertools

import pytest

from storage.visibility.rule import server_may_see, user_may_see

VISIBILITIES = ["world_readable", "shared", "invited", "joined", None, "friends"]
MEMBERSHIPS = ["join", "invite", "knock", "leave", "ban", None]

# Who sees an event that changes neither the visibility nor the membership. Y: sees it; L: if they
# joined later; -: does not.
USERS = """
                 join  invite  knock  leave  ban  None
world_readable    Y      Y       Y      Y     Y     Y
shared            Y      L       L      L     L     L
invited           Y      Y       -      -     -     -
joined            Y      -       -      -     -     -
None              Y      L       L      L     L     L
friends           Y      L       L      L     L     L
"""

SERVERS = """
                 join  invite  knock  leave  ban  None
world_readable    Y      Y       Y      Y     Y     Y
shared            Y      Y       Y      Y     Y     Y
invited           Y      Y       -      -     -     -
joined            Y      -       -      -     -     -
None              Y      Y       Y      Y     Y     Y
friends           Y      Y       Y      Y     Y     Y
"""


def table(text: str) -> dict[tuple[str | None, str | None], str]:
    head, *lines = [line.split() for line in text.strip().splitlines()]
    names: dict[str, str | None] = {"None": None}
    return {
        (names.get(line[0], line[0]), names.get(column, column)): mark
        for line in lines
        for column, mark in zip(head, line[1:], strict=True)
    }


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=str)
@pytest.mark.parametrize("membership", MEMBERSHIPS, ids=str)
def test_the_table_of_users(visibility: str | None, membership: str | None) -> None:
    mark = table(USERS)[visibility, membership]
    assert user_may_see(visibility, visibility, membership, membership, joined_later=False) == (
        mark == "Y"
    )
    assert user_may_see(visibility, visibility, membership, membership, joined_later=True) == (
        mark in {"Y", "L"}
    )


@pytest.mark.parametrize("visibility", VISIBILITIES, ids=str)
@pytest.mark.parametrize("membership", MEMBERSHIPS, ids=str)
def test_the_table_of_servers(visibility: str | None, membership: str | None) -> None:
    assert server_may_see(visibility, visibility, membership, membership) == (
        table(SERVERS)[visibility, membership] == "Y"
    )


@pytest.mark.parametrize("joined_later", [False, True])
def test_a_change_of_visibility_is_seen_under_the_value_before_or_after(joined_later: bool) -> None:
    for before, after, membership in itertools.product(VISIBILITIES, VISIBILITIES, MEMBERSHIPS):
        either = any(
            user_may_see(value, value, membership, membership, joined_later)
            for value in (before, after)
        )
        assert user_may_see(before, after, membership, membership, joined_later) == either
        either = any(
            server_may_see(value, value, membership, membership) for value in (before, after)
        )
        assert server_may_see(before, after, membership, membership) == either


@pytest.mark.parametrize("joined_later", [False, True])
def test_the_own_membership_is_seen_under_the_one_before_or_after(joined_later: bool) -> None:
    for before, after, visibility in itertools.product(MEMBERSHIPS, MEMBERSHIPS, VISIBILITIES):
        either = any(
            user_may_see(visibility, visibility, value, value, joined_later)
            for value in (before, after)
        )
        assert user_may_see(visibility, visibility, before, after, joined_later) == either
        either = any(
            server_may_see(visibility, visibility, value, value) for value in (before, after)
        )
        assert server_may_see(visibility, visibility, before, after) == either


@pytest.mark.parametrize(
    "what, visibility, membership, joined_later, sees",
    [
        ("their own leave", ("joined", "joined"), ("join", "leave"), False, True),
        ("their own ban", ("joined", "joined"), ("join", "ban"), False, True),
        ("their own join", ("joined", "joined"), (None, "join"), False, True),
        (
            "their own invite where only joined users see",
            ("joined", "joined"),
            (None, "invite"),
            False,
            False,
        ),
        (
            "their own invite where the invited see",
            ("invited", "invited"),
            (None, "invite"),
            False,
            True,
        ),
        (
            "the change that opens the room, as a stranger",
            ("joined", "world_readable"),
            (None, None),
            False,
            True,
        ),
        (
            "the change that closes it, as a stranger",
            ("world_readable", "joined"),
            (None, None),
            False,
            True,
        ),
        (
            "the first history visibility, before which it was shared",
            (None, "joined"),
            (None, None),
            True,
            True,
        ),
    ],
)
def test_well_known_cases(
    what: str,
    visibility: tuple[str | None, str | None],
    membership: tuple[str | None, str | None],
    joined_later: bool,
    sees: bool,
) -> None:
    assert user_may_see(*visibility, *membership, joined_later) == sees, what


def test_a_server_that_was_never_joined_gets_world_readable_events_alone() -> None:
    for before, after, membership in itertools.product(VISIBILITIES, VISIBILITIES, MEMBERSHIPS):
        readable = "world_readable" in (before, after)
        assert server_may_see(before, after, membership, membership, ever_joined=False) is readable
