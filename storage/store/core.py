"""State that all calls of a store share: the pool, the streams, the writer and the caches.

Each subject has a module of calls. They are functions whose first argument is a `StoreCore`.
`storage.store.facade.Store` lists them as its methods.
"""

from collections.abc import Mapping

from signedjson.types import SigningKey

from storage import arguments as args
from storage.cache_sizes import CacheSizes
from storage.database.connection import Database
from storage.database.sizes import SizeCache
from storage.event.signatures import OldKey
from storage.observability.counters import Measures
from storage.persist import Writer
from storage.queries.events import StoredEvent
from storage.queries.sliding.connection import Connections
from storage.queries.sliding.memory import SlidingMemory
from storage.queries.sliding.room_lists import RoomLists
from storage.queries.state_at import StateMap
from storage.queries.sync import SyncMemory
from storage.queries.sync.state import SentMembers
from storage.streams.account_data import AccountData
from storage.streams.caches import ReadCaches
from storage.streams.cursors import Cursors
from storage.streams.defined_streams import DefinedStreams
from storage.streams.notifier import Notifier
from storage.streams.reads import Reads
from storage.streams.receipts import Receipts
from storage.streams.registry import Streams
from storage.streams.restore_detection import Identity
from storage.streams.stream_writer import StreamWriter
from storage.streams.to_device import ToDevice


class StoreCore:
    """An open database of one homeserver."""

    def __init__(
        self,
        database: Database,
        streams: Streams,
        writer: Writer,
        identity: Identity,
        signing_key: SigningKey | None = None,
        *,
        old_signing_keys: Mapping[str, OldKey] | None = None,
    ) -> None:
        self.database = database
        self.reads: Reads = streams.reads
        self.streams = streams
        self.writer = writer
        self.signing_key: SigningKey | None = signing_key
        self.old_signing_keys: Mapping[str, OldKey] = old_signing_keys or {}
        self.server_name: str = identity.server_name
        self.instance_name: str = identity.instance_name
        self.deployment_id: str = identity.deployment_id
        self.sizes: SizeCache = SizeCache(database)
        sizes = CacheSizes.of(database.config.cache_mb)
        self.notifier: Notifier = Notifier(streams, remembered=sizes.notifier_keys)
        self.caches: ReadCaches[StoredEvent, StateMap] = ReadCaches.of(
            sizes, streams.feed, self._furthest()
        )
        streams.on_restart(lambda _: self.caches.restart(self._furthest()))
        lists = RoomLists.following(sizes, streams.feed, lambda name: streams[name].positions())
        self.memory: SyncMemory = SyncMemory(
            lambda name: streams[name].positions(),
            self.caches.rooms_of,
            self.caches.room_changes,
            self.caches.state_changes,
            lambda: lists.changes.clock,
        )
        self.sent_members: SentMembers = SentMembers()
        self.sliding: SlidingMemory = SlidingMemory(
            self.memory,
            lists,
            Connections(sizes.sliding_rooms),
            self.notifier,
        )
        streams.on_restart(lambda _: self.sliding.forget())
        self.account_data: AccountData = AccountData(
            self._stream_writer("account_data", identity), identity.server_name
        )
        self.to_device: ToDevice = ToDevice(
            self._stream_writer("to_device", identity), identity.server_name
        )
        self.receipts: Receipts = Receipts(self._stream_writer("receipts", identity))
        self.cursors: Cursors = Cursors(database, self.reads)
        self.defined_streams: DefinedStreams = DefinedStreams(
            database, streams, identity.writer_nid
        )

    def _stream_writer(self, name: str, identity: Identity) -> StreamWriter:
        return StreamWriter(name, self.database, self.streams, identity.writer_nid)

    def _furthest(self) -> int:
        """Return the position above which every event is published to this process."""
        return self.streams["events"].current().furthest()

    @property
    def measures(self) -> Measures:
        """The counters and timers of this store.

        `storage.observability.prometheus` exposes them to Prometheus.
        """
        return self.database.measures


def page_limit(store: StoreCore, limit: int) -> int:
    """Cap a limit at `Config.page_limit_max`. `InputError` for a negative one."""
    return args.limit(limit, store.database.config.page_limit_max)
