"""Plan what an event changes, without I/O.

A plan reads and fills a `ChangeSet`. It raises `MissingData` for what is not in
memory. The caller loads that and plans the event again.
"""
