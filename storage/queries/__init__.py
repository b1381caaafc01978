"""The questions that clients and servers ask: one file each.

Functions that take a connection first; no state, no writes.
"""
