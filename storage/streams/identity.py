"""Whose store it is that writes to the streams."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The homeserver, the process, its number among the writers, and the database."""

    server_name: str
    instance_name: str
    writer_nid: int
    deployment_id: str
