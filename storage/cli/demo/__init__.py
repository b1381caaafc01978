"""`room-storage demo`: a few rooms, stored and read back, as tables to look at.

story.py       a room written by hand: who is in it, and what happened
rooms.py       that room and some generated ones, as files to import
scenes.py      what the store answers, one table each
timing.py      how long the answers take, and in how many statements
teller.py      tables for people, or one document for programs
command.py     the order of it all
"""

from storage.cli.demo.command import command

__all__ = ["command"]
