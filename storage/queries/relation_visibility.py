"""The condition under which a user sees that one event relates to another one."""

from typing import Final, LiteralString

TEMPLATE_RELATION_IS_VISIBLE: Final[LiteralString] = """
    user_sees_relation(e, {reader}.joined_since, {reader}.own_audiences, {reader}.shared_audiences,
        {reader}.world_audiences, {reader}.shared_before, {reader}.reader_nid, {reader}.unread,
        {reader}.ignored)
    AND (was_there(e, {reader}.joined_since, {reader}.joined_audiences)
        OR NOT EXISTS (SELECT FROM erased_users u WHERE u.principal_nid = e.sender_nid)
        OR was_there_before(e, {reader}.reader_nid, {reader}.unread))
"""
"""Of the event `e`, shown whole: a relation is a part of the content, which erasure removes."""
