"""Identity of the writer: server name, instance name, writer nid and deployment id."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Identity:
    """The homeserver, the process, its writer nid, and the database."""

    server_name: str
    instance_name: str
    writer_nid: int
    deployment_id: str
