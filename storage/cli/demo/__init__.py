"""`room-storage demo`: store a few rooms, read them back, and show the results as tables.

story.py       a room written by hand: its members and events
rooms.py       that room and some generated ones, as files to import
scenes.py      results of the store, one table each
timing.py      time and number of statements of each query
place.py       the folder or the schema of the data
what_next.py   commands to go on with
teller.py      tables for people, or one document for programs
command.py     the order of the demonstration
"""

from storage.cli.demo.command import command

__all__ = ["command"]
