"""The store: what a homeserver holds, and how it is opened."""
