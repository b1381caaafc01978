"""Imports: archives and data frames into a store.

Lines are read, validated, staged, planned and loaded room by room.
"""
