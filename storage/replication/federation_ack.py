"""How far the workers that send to other servers have got (FEDERATION_ACK): what all of them have dealt with may be forgotten."""

from storage.replication.commands import FederationAck


class Acknowledgements:
    """The position that each worker has acknowledged. Kept when a worker goes: it goes on from there when it is back."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}

    def told(self, command: FederationAck) -> None:
        """A worker acknowledges a position; an older one than before changes nothing."""
        known = self._tokens.get(command.instance_name)
        self._tokens[command.instance_name] = command.token if known is None else max(known, command.token)

    def of(self, instance_name: str) -> int | None:
        """What this worker has acknowledged; None: nothing yet."""
        return self._tokens.get(instance_name)

    def lowest(self) -> int | None:
        """What every worker has acknowledged; None if there is none."""
        return min(self._tokens.values(), default=None)

    def forget(self, instance_name: str) -> None:
        """This worker will not come back."""
        self._tokens.pop(instance_name, None)
