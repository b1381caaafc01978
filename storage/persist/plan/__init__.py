"""Decide what an event changes.

Pure: reads a `CacheView`, fills a `ChangeSet`, raises `MissingData` for what is not at hand.
"""
