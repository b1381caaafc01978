"""Replication: what one process commits, the others learn of. The line protocol over TCP, over Redis, or inside one process."""
