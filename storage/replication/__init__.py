"""Replication: processes publish their commits to each other.

The line protocol over TCP, over Redis, or inside one process.
commands.py               the lines
connection.py             the protocol on a socket
peer.py                   the commands for an advance; one participant
server.py, client.py      TCP
redis_transport.py        Redis (needs the extra "redis")
in_process.py             a hub within one event loop
follower.py               holes, and how they are filled
transport.py, syncing.py  the commands that are not about streams
"""

from storage.replication.client import Client
from storage.replication.in_process import Hub
from storage.replication.peer import ReplicationPeer
from storage.replication.server import Server
from storage.replication.transport import Handlers

__all__ = ["Client", "Handlers", "Hub", "ReplicationPeer", "Server"]
