"""Explain in a sentence why a user or a server may see an event, or may not.

The sentence follows the rule of history visibility. It is made from the states before and after the
event and from the event's flags, and not from the visibility table. The answer of the table is
compared with it, and the sentence reports a difference. The table only helps to find a join: what
it names is read, and what it denies is looked for among `SCANNED_MAX` events.
"""

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final, LiteralString, NamedTuple

import orjson

from storage.codec import StoredBytes, decode
from storage.database.columns import OWN_ENTRIES
from storage.database.connection import Connection
from storage.database.names import MEMBERSHIP_NAMES
from storage.database.placeholders import compose, fill
from storage.errors import InvalidIdentifier, UnknownEvent
from storage.event import load
from storage.ids import EventId, ServerName, UserId
from storage.queries.events import visible_to_server, visible_to_user
from storage.visibility import server_may_see, user_may_see

SQL_IS_READER_STORED: Final[LiteralString] = fill("""
SELECT EXISTS (SELECT FROM principals WHERE name = $1::text)
    OR EXISTS (SELECT FROM state_keys WHERE type_nid = {TYPE_MEMBER} AND state_key = $1::text)
""")

SQL_EXPLAINED: Final[LiteralString] = """
SELECT e.event_nid, e.room_nid, e.outlier, e.rejected, e.soft_failed, e.refused, e.ineffective,
    e.redacted_form, e.topological_ordering, b.event_id AS redacted_by,
    e.state_group_before, COALESCE(e.state_group_after, e.state_group_before) AS state_group_after,
        e.membership, k.state_key, s.name AS sender,
    EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid) AS is_sender_erased,
    EXISTS (SELECT FROM partial_rooms p WHERE p.room_nid = e.room_nid) AS is_room_partial,
    EXISTS (
        SELECT
        FROM partial_rooms p
        JOIN events joined ON joined.event_id = p.join_event_id
        WHERE p.room_nid = e.room_nid AND e.stream_ordering >= joined.stream_ordering
    ) AS is_state_partial
FROM events e
JOIN principals s ON s.principal_nid = e.sender_nid
LEFT JOIN events b ON b.event_nid = e.redacted_by
LEFT JOIN state_keys k ON k.state_key_nid = e.state_key_nid
WHERE e.event_id = $1::text
"""

SQL_VISIBILITY_AT: Final[LiteralString] = fill("""
SELECT e.json, e.redacted_form, e.event_id, r.room_id, r.room_version
FROM state_entries($1::bigint) AS s
JOIN events e ON e.event_nid = s.event_nid
JOIN rooms r USING (room_nid)
WHERE s.state_key_nid = {KEY_HISTORY_VISIBILITY}
""")

SQL_MEMBERSHIPS_AT: Final[LiteralString] = fill("""
SELECT COALESCE(max(e.membership), 0)
FROM state_entries($1::bigint) AS s
JOIN state_keys k ON k.state_key_nid = s.state_key_nid
JOIN events e ON e.event_nid = s.event_nid
WHERE k.type_nid = {TYPE_MEMBER}
    AND CASE WHEN $2::text LIKE '@%' THEN k.state_key = $2::text
        ELSE substr(k.state_key, strpos(k.state_key, ':') + 1) = $2::text END
""")

SQL_EVER_JOINED: Final[LiteralString] = compose(
    """
WITH
known AS MATERIALIZED (  -- by the visibility table; it also knows of history that was purged
    SELECT EXISTS (
        SELECT
        FROM principals p
        JOIN whole_visibility s USING (principal_nid)
        WHERE p.name = $2::text AND s.room_nid = $1::int AND s.audiences <> s.invited_audiences
    ) AS ever
),
joins AS MATERIALIZED (  -- where the table denies it: among the latest events
    SELECT e.event_nid
    FROM (
        SELECT e.event_nid, e.state_key_nid, e.membership, e.rejected
        FROM events e
        WHERE e.room_nid = $1::int AND NOT e.outlier AND NOT (SELECT ever FROM known)
        ORDER BY e.topological_ordering DESC, e.stream_ordering DESC
        LIMIT $3::bigint
    ) AS e
    JOIN state_keys k USING (state_key_nid)
    WHERE e.membership = {JOIN} AND e.rejected IS NULL
        AND substr(k.state_key, strpos(k.state_key, ':') + 1) = $2::text
)
SELECT (SELECT ever FROM known) OR CASE
    WHEN EXISTS (SELECT FROM joins) THEN EXISTS (
        SELECT
        FROM state_groups g
        CROSS JOIN LATERAL :own_entries.call(g) AS m
        JOIN joins ON joins.event_nid = m.event_nid
        WHERE g.room_nid = $1::int AND m.is_member
    )
    ELSE false
END
""",
    OWN_ENTRIES,
).sql

SQL_JOINS: Final[LiteralString] = fill("""
WITH
member AS MATERIALIZED (
    SELECT state_key_nid FROM state_keys WHERE type_nid = {TYPE_MEMBER} AND state_key = $2::text
),
present AS MATERIALIZED (
    SELECT EXISTS (
        SELECT FROM current_state c
        JOIN member USING (state_key_nid)
        WHERE c.room_nid = $1::int AND c.membership = {JOIN}
    ) AS is_joined
),
known AS MATERIALIZED (  -- the last join, where the visibility table says
    SELECT e.event_id
    FROM principals p
    JOIN visibility v ON v.principal_nid = p.principal_nid AND v.room_nid = $1::int
    JOIN events e ON e.room_nid = v.room_nid AND NOT e.outlier
        AND e.topological_ordering = v.last_join_topological
    JOIN member USING (state_key_nid)
    WHERE p.name = $2::text AND e.topological_ordering > $3::bigint AND e.membership = {JOIN}
        AND NOT e.soft_failed AND e.rejected IS NULL
    LIMIT 1
)
SELECT present.is_joined,
    COALESCE((SELECT event_id FROM known), (
        SELECT e.event_id
        FROM (
            SELECT e.event_id, e.state_key_nid, e.membership, e.soft_failed, e.rejected
            FROM events e
            WHERE e.room_nid = $1::int AND NOT e.outlier AND e.topological_ordering > $3::bigint
                AND NOT (present.is_joined OR EXISTS (SELECT FROM known))
            ORDER BY e.topological_ordering, e.stream_ordering
            LIMIT $4::bigint
        ) AS e
        JOIN member USING (state_key_nid)
        WHERE e.membership = {JOIN} AND NOT e.soft_failed AND e.rejected IS NULL
        LIMIT 1
    )) AS join_id
FROM present
""")

SQL_FORGOTTEN: Final[LiteralString] = fill("""
SELECT EXISTS (
    SELECT
    FROM memberships m
    JOIN principals p USING (principal_nid)
    WHERE m.room_nid = $1::int AND p.name = $2::text AND m.forgotten AND m.membership < {KNOCK}
)
""")

SQL_IGNORED: Final[LiteralString] = """
SELECT a.content
FROM principals p
JOIN account_data a USING (principal_nid)
JOIN event_types t USING (type_nid)
WHERE p.name = $1::text AND a.room_nid = 0 AND t.type = 'm.ignored_user_list'
"""

SCANNED_MAX: Final = 20_000
"""Events that are looked at for a join that the visibility table does not know."""

WORDS: Final = {
    "join": "joined",
    "invite": "invited",
    "leave": "gone",
    "ban": "banned",
    "knock": "knocking",
}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Whether ``principal`` may see the event, and why.

    States are as (before, after); None stands for a missing event. ``joined_later``: the user is
    joined now, or joined after the event (the sentence has the id of that join). ``ignored``: the
    user ignores the sender, by their account data m.ignored_user_list, so clients do not get the
    event though it is visible. ``known``: an event by or about the user is stored, or the server
    was in a stored room. False may be a mistake in writing, and the sentence says so.
    """

    event_id: EventId
    principal: str
    visible: bool
    sentence: str
    history_visibility: tuple[str | None, str | None]
    membership: tuple[str | None, str | None]
    joined_later: bool
    ignored: bool = False
    known: bool = True

    def __str__(self) -> str:
        return self.sentence


class ExplainedRow(NamedTuple):
    """The columns of an event that the explanation needs."""

    event_nid: int
    room_nid: int
    outlier: bool
    rejected: str | None
    soft_failed: bool
    refused: str | None
    ineffective: bool
    redacted_form: bool
    topological_ordering: int | None
    redacted_by: str | None
    state_group_before: int | None
    state_group_after: int | None
    membership: int | None
    state_key: str | None
    sender: str
    is_sender_erased: bool
    is_room_partial: bool
    is_state_partial: bool
    """The state before the event lacks members."""


class VisibilityEventRow(NamedTuple):
    """The history visibility event of a state."""

    json: StoredBytes
    redacted_form: bool
    event_id: str
    room_id: str
    room_version: str


class JoinsRow(NamedTuple):
    """Whether a user is joined now, and a join after an event."""

    is_joined: bool
    join_id: str | None


class RuleInputs(NamedTuple):
    """The input of the rule."""

    visibilities: tuple[str | None, str | None]
    memberships: tuple[str | None, str | None]
    joins: JoinsRow
    ever_joined: bool
    """For a server: it had a joined user in some state of the room."""
    is_forgotten: bool = False
    """For a user: they have forgotten the room."""
    is_ignored: bool = False
    """For a user: they ignore the sender, and the event is no state event."""


async def is_reader_stored(conn: Connection, name: str) -> bool:
    """Return whether a stored event is by or about a user, or a server was in a stored room."""
    return bool(await conn.fetchval(SQL_IS_READER_STORED, name))


async def explain_visibility(conn: Connection, event_id: EventId, reader: str) -> Explanation:
    """Explain why a local user ("@…") or a server may see an event, or may not.

    Call it within a snapshot. Raise `UnknownEvent`, or `InvalidIdentifier` for text that is
    neither.
    """
    row = await conn.fetchrow(SQL_EXPLAINED, event_id, row=ExplainedRow)
    if row is None:
        raise UnknownEvent(event_id)
    is_user, is_stored = reader.startswith("@"), await is_reader_stored(conn, reader)
    if not is_user:
        _check_server(reader, is_stored=is_stored)
    facts = await _facts(conn, row, reader, is_user=is_user)
    refused = _flags(row, is_user=is_user)
    if refused is None and facts.is_forgotten and "world_readable" not in facts.visibilities:
        refused = "they have forgotten the room"
    visible, why = (False, refused) if refused is not None else _rule(facts, is_user=is_user)
    is_withheld = visible and row.is_sender_erased and "join" not in facts.memberships
    if is_withheld and not is_user:
        visible, why = False, f"{row.sender} is erased, and the server was not joined"
    joined_later = facts.joins.is_joined or facts.joins.join_id is not None
    parts = [f"{reader} {'may see' if visible else 'may not see'} {event_id}: {why}."]
    parts += _remarks(row, facts, visible=visible, is_user=is_user)
    if visible and is_withheld:
        parts.append(
            f"{row.sender} is erased and they were not joined, so the content is left out."
        )
    if not visible and not is_user and refused is None and facts.ever_joined:
        parts.append("It gets the redacted form.")
    if await _by_table(conn, event_id, reader, is_user=is_user) != visible:
        parts.append("The visibility table says otherwise: run `room-storage verify --repair`.")
    if not is_stored:
        parts.append(_unknown(reader, is_user=is_user))
    return Explanation(
        event_id,
        reader,
        visible,
        " ".join(parts),
        facts.visibilities,
        facts.memberships,
        joined_later,
        facts.is_ignored,
        is_stored,
    )


def _unknown(reader: str, *, is_user: bool) -> str:
    """Return the sentence that warns of a mistake in writing."""
    if is_user:
        return f"No event by or about {reader} is stored here: check the spelling."
    return f"No stored room has had a member of {reader}: check the spelling."


def _remarks(row: ExplainedRow, facts: RuleInputs, *, visible: bool, is_user: bool) -> list[str]:
    """Return sentences about what a reader gets of a visible event, and about what is not known."""
    remarks = []
    if visible and row.redacted_by is not None:
        remarks.append(f"Its content is reduced by the redaction {row.redacted_by}.")
    if visible and row.redacted_form:
        remarks.append("Its content hash is wrong, so only the redacted form is valid.")
    if visible and facts.is_ignored:
        remarks.append(f"But they ignore {row.sender}, so their clients do not get it.")
    if is_user and row.is_state_partial and facts.memberships == (None, None):
        remarks.append("That is as far as members are known: the room has a partial state.")
    return remarks


def _check_server(name: str, *, is_stored: bool) -> None:
    """Raise `InvalidIdentifier` for a name that looks like the local part of a user id.

    A host name may have no dot, but then a room knows it.
    """
    if not re.search(r"[.:]", name) and not is_stored:
        raise InvalidIdentifier(
            name, "no server of this name is known here; a user id is @localpart:server"
        )


async def _facts(conn: Connection, row: ExplainedRow, reader: str, *, is_user: bool) -> RuleInputs:
    groups = [row.state_group_before, row.state_group_after]
    before, after = [await _visibility(conn, group) for group in groups]
    was, becomes = [await _membership(conn, group, reader) for group in groups]
    joins = (
        await conn.fetchrow(
            SQL_JOINS,
            *(row.room_nid, reader, row.topological_ordering, SCANNED_MAX),
            row=JoinsRow,
        )
        if is_user
        else None
    )
    ever = is_user or "join" in (was, becomes) or await _ever_joined(conn, row.room_nid, reader)
    forgotten = is_user and bool(await conn.fetchval(SQL_FORGOTTEN, row.room_nid, reader))
    ignored = is_user and row.state_key is None and row.sender in await _ignored(conn, reader)
    return RuleInputs(
        (before, after),
        (was, becomes),
        joins or JoinsRow(is_joined=False, join_id=None),
        ever,
        forgotten,
        ignored,
    )


async def _ever_joined(conn: Connection, room_nid: int, server: str) -> bool:
    """Return whether a user of a server was joined in some state of the room."""
    return bool(await conn.fetchval(SQL_EVER_JOINED, room_nid, server, SCANNED_MAX))


async def _ignored(conn: Connection, user_id: str) -> Collection[str]:
    """Return the users that a user ignores (client-server API, "Ignoring Users")."""
    content: bytes | None = await conn.fetchval(SQL_IGNORED, user_id)
    listed = None if content is None else orjson.loads(content).get("ignored_users")
    return listed.keys() if isinstance(listed, dict) else ()


async def _visibility(conn: Connection, state_group: int | None) -> str | None:
    row = (
        None
        if state_group is None
        else await conn.fetchrow(SQL_VISIBILITY_AT, state_group, row=VisibilityEventRow)
    )
    if row is None:
        return None
    raw = decode(row.json, row.event_id, row.room_id)
    value: Any = load(raw, row.room_version, row.event_id, redacted=row.redacted_form).content.get(
        "history_visibility"
    )
    return value if isinstance(value, str) else None


async def _membership(conn: Connection, state_group: int | None, reader: str) -> str | None:
    """Return the membership in a state; for a server, the highest of its users."""
    code = (
        None
        if state_group is None
        else await conn.fetchval(SQL_MEMBERSHIPS_AT, state_group, reader)
    )
    return None if code is None else MEMBERSHIP_NAMES.get(code)


def _flags(row: ExplainedRow, *, is_user: bool) -> str | None:
    """Return why an event is hidden whatever the room's history visibility is, else None."""
    if row.outlier:
        return "it is an outlier, which has no position in the room"
    if row.rejected is not None:
        return f"it was rejected ({row.rejected})"
    if is_user:
        return _flags_for_users(row)
    if row.is_room_partial:
        return "the members of the room are not all known yet, so no server gets its events"
    return None


def _flags_for_users(row: ExplainedRow) -> str | None:
    if row.refused is not None:
        return f"this server refused it ({row.refused}), though the rules accept it"
    if row.soft_failed:
        return "it was soft-failed: when it arrived, the current state of the room did not allow it"
    if row.ineffective:
        return (
            "it is a redaction without effect:"
            " its target is not stored, was rejected, or was not the sender's to redact"
        )
    return None


def _rule(facts: RuleInputs, *, is_user: bool) -> tuple[bool, str]:
    """Apply the rule; return the answer and its reason."""
    joined_later = facts.joins.is_joined or facts.joins.join_id is not None
    visible = (
        user_may_see(*facts.visibilities, *facts.memberships, joined_later)
        if is_user
        else server_may_see(*facts.visibilities, *facts.memberships, ever_joined=facts.ever_joined)
    )
    visibilities = [_effective(visibility) for visibility in facts.visibilities]
    sentence = f"the history visibility was {_around(*map(_shown, facts.visibilities))}"
    whom = "they were" if is_user else "the server's users were"
    memberships = (WORDS.get(membership or "", "not members") for membership in facts.memberships)
    member = f"{whom} {_around(*memberships)}"
    if not visible:
        member = member if facts.ever_joined else "the server was never joined to the room"
        later = ", and they never joined later" if is_user and "shared" in visibilities else ""
        return False, f"{sentence}, and {member}{later}"
    if "world_readable" in visibilities:
        return True, sentence
    if "join" in facts.memberships:
        return True, member
    if "invite" in facts.memberships and "invited" in visibilities:
        return True, f"{sentence}, and {member}"
    if not is_user:
        return True, f"{sentence}, which is for every server in the room"
    when = "are joined now" if facts.joins.is_joined else f"joined later ({facts.joins.join_id})"
    return True, f"{sentence}, and they {when}"


def _effective(visibility: str | None) -> str:
    return visibility if visibility in {"world_readable", "invited", "joined"} else "shared"


def _shown(visibility: str | None) -> str:
    """Return the value that applies, with the stored one if the specification lacks it."""
    effective = _effective(visibility)
    return (
        effective if visibility in {None, effective} else f"{effective} ({visibility!r} is unknown)"
    )


def _around(before: str, after: str) -> str:
    """Describe a value before and after an event."""
    return f"{before} before it and {after} after it" if before != after else before


async def _by_table(conn: Connection, event_id: EventId, reader: str, *, is_user: bool) -> bool:
    if is_user:
        return bool(await visible_to_user(conn, UserId(reader), [event_id]))
    return bool(await visible_to_server(conn, ServerName(reader), [event_id]))
