"""The condition under which a user sees that one event relates to another one."""

from typing import Final, LiteralString

TEMPLATE_RELATION_IS_VISIBLE: Final[LiteralString] = """
    user_sees_relation(e, :user_sees.of({reader}), {reader}.ignored)
    AND :whole.of({reader})
"""
"""Of the event `e`, shown whole: a relation is a part of the content, which erasure removes."""
