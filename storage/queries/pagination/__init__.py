"""Pages of a topological order: ranges, tokens, and pages after events were reordered."""
