"""The graph of a room: topological order."""
