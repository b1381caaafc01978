"""Numbers of names: event types, state keys, users and servers.

A view reads through to the caches of the process, and collects what the batch adds and changes.
"""

from collections.abc import Iterable

from storage.persist.model.caches import WriterCaches
from storage.persist.model.missing_data import MissingData, ensure
from storage.persist.model.nid_blocks import NidBlocks


class NameView:
    """Numbers of names: event types, state keys, users and servers."""

    def __init__(self, caches: WriterCaches, blocks: NidBlocks) -> None:
        self.caches = caches
        self.blocks = blocks
        self.types: dict[str, int | None] = {}
        self.type_names: dict[int, str] = {}
        self.state_keys: dict[tuple[int, str], int | None] = {}
        self.state_key_names: dict[int, tuple[int, str]] = {}
        self.principals: dict[str, int | None] = {}
        self.newcomers: set[int] = set()  # principals without a row in any table yet
        self.new_types: dict[str, int] = {}
        self.new_state_keys: dict[tuple[int, str], int] = {}
        self.new_principals: dict[str, int] = {}

    def find_type(self, name: str) -> int | None:
        """Return the nid of an event type, or None if it has none yet."""
        nid = self.caches.names.types.get(name) or self.types.get(name)
        if nid is None and name not in self.types:
            raise MissingData("types", (name,))
        return nid

    def type_name(self, type_nid: int) -> str:
        name = self.caches.names.type_names.get(type_nid) or self.type_names.get(type_nid)
        if name is None:
            raise MissingData("type_names", (type_nid,))
        return name

    def find_state_key(self, type_nid: int, state_key: str) -> int | None:
        """Return the nid of a state key, or None if it has none yet."""
        key = (type_nid, state_key)
        nid = self.caches.names.state_keys.get(key) or self.state_keys.get(key)
        if nid is None and key not in self.state_keys:
            raise MissingData("state_keys", (key,))
        return nid

    def state_key_name(self, state_key_nid: int) -> tuple[int, str]:
        """Return the type nid and the state key of a nid.

        The name is copied to the change set, because the caches may drop it before the write.
        """
        name = self.state_key_names.get(state_key_nid)
        if name is None:
            name = self.caches.names.state_key_names.get(state_key_nid)
            if name is None:
                raise MissingData("state_key_names", (state_key_nid,))
            self.state_key_names[state_key_nid] = name
        return name

    def ensure_state_key_names(self, state_key_nids: Iterable[int]) -> None:
        """Copy the names of these state keys into the view, so that they stay until the write.

        Raise `MissingData` for unknown ones.
        """
        known = self.caches.names.state_key_names
        lacking = [nid for nid in state_key_nids if nid not in self.state_key_names]
        self.state_key_names.update((nid, known[nid]) for nid in lacking if nid in known)
        ensure("state_key_names", lacking, self.state_key_names, known)

    def find_principal(self, name: str) -> int | None:
        """Return the nid of a user or server, or None if it has none yet."""
        nid = self.caches.names.principals.get(name) or self.principals.get(name)
        if nid is None and name not in self.principals:
            raise MissingData("principals", (name,))
        return nid

    def ensure_principals(self, names: Iterable[str]) -> None:
        """Raise `MissingData` unless the nid, or its absence, is known for each of these names."""
        ensure("principals", names, self.principals, self.caches.names.principals)

    def type_nid(self, name: str) -> int:
        """Return the nid of an event type. Allocate one if it has none."""
        nid = self.new_types.get(name) or self.find_type(name)
        if nid is None:
            nid = self.blocks.take("type_nids")
            self.new_types[name] = self.types[name] = nid
            self.type_names[nid] = name
        return nid

    def state_key_nid(self, type_nid: int, state_key: str) -> int:
        key = (type_nid, state_key)
        nid = self.find_state_key(type_nid, state_key)
        if nid is None:
            nid = self.blocks.take("state_key_nids")
            self.new_state_keys[key] = self.state_keys[key] = nid
            self.state_key_names[nid] = key
        return nid

    def principal_nid(self, name: str) -> int:
        """Return the nid of a user or server. Allocate one if it has none."""
        nid = self.find_principal(name)
        if nid is None:
            nid = self.blocks.take("principal_nids")
            self.new_principals[name] = self.principals[name] = nid
            self.newcomers.add(nid)
        return nid
