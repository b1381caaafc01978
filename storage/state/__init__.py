"""Room state: groups as levelled deltas (levels, groups), and reading them (read)."""
