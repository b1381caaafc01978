"""The graph of a room: topological order and the chain cover."""
