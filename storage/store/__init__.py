"""The store: the calls of a homeserver, and how to open it."""
