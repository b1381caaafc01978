"""Sliding sync, MSC4186: a part of the rooms of a user, as a client asks for it."""
