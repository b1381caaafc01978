"""Who may see which event: the rule (rule.py, pure), and the table that has it decided beforehand."""

from storage.visibility.rule import server_may_see, user_may_see

__all__ = ["server_may_see", "user_may_see"]
