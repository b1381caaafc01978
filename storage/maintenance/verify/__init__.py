"""Recompute what can be recomputed, and report every difference. Reads only; one room after the other.

version      the room's version, against its create event
content      the received bytes, and the columns that repeat them
graph        topological order, gaps, forward extremities
groups       rows of state groups
states       state before and after each event, current state; resolving does resolution again
verdicts     which events the auth rules reject
current      current state by key, memberships of local users
cover        the chain cover, against auth_graph
redactions   which redaction took effect
visibility   the visibility table against the states; sight says whom they admit
indexes      indexes that do not agree with their tables, before everything else
positions    stream positions and sequences of the whole database
"""

from storage.maintenance.verify.finding import REPAIRABLE, Finding
from storage.maintenance.verify.run import DATABASE_CHECKS, ROOM_CHECKS, all_rooms, verify, verify_database, verify_room

__all__ = ["DATABASE_CHECKS", "REPAIRABLE", "ROOM_CHECKS", "Finding", "all_rooms", "verify", "verify_database", "verify_room"]
