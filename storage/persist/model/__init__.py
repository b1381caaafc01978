"""Rows, caches and change sets that plan, load, write and commit share."""
