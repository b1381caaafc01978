"""The visibility of events: the rule (rule.py, pure), and the table of its precomputed results."""

from storage.visibility.rule import server_may_see, user_may_see

__all__ = ["server_may_see", "user_may_see"]
