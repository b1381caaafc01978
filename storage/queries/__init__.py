"""The queries of clients and servers: one file each.

Their functions take a connection first. They have no state, and write nothing.
"""
