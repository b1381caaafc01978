"""Replication: what one process commits, the others learn of.

The line protocol over TCP, over Redis, or inside one process.

commands.py             the lines                     connection.py            the protocol on a
                        socket
announcing.py           what is said of an advance    server.py, client.py     TCP
follower.py             holes, and how they close     redis_transport.py       Redis (needs the
                        extra "redis")
peer.py             one participant               in_process.py            a hub within one event
                    loop
handlers.py, syncing.py, federation_ack.py            what becomes of the commands that are not
                                                      about streams
"""

from storage.replication.client import Client
from storage.replication.handlers import Handlers
from storage.replication.in_process import Hub
from storage.replication.peer import ReplicationPeer
from storage.replication.server import Server

__all__ = ["Client", "Handlers", "Hub", "ReplicationPeer", "Server"]
