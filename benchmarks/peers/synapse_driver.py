"""A driver of Synapse's storage layer, by lines of JSON; run by its environment's interpreter.

It is never imported. It runs the real HomeServer with its reactor, threads, connection pool, caches
and default settings, without other servers: the federation whitelist is empty. It has no listeners,
or one for clients at a `client_port`. Each input line is `{"do": name, …}`, each output line its
result, or `{"error": …}`. It calls Synapse's own entry points, and counts where all statements and
transactions pass.

  python synapse_driver.py '{"server_name": …, "folder": …, "host": …, "port": …, "user": …, …}'

Without a host, the database is SQLite in the folder.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from synapse.api.constants import Direction
from synapse.api.filtering import FilterCollection
from synapse.api.room_versions import KNOWN_ROOM_VERSIONS
from synapse.app.homeserver import SynapseHomeServer, create_homeserver, setup, start
from synapse.config.homeserver import HomeServerConfig
from synapse.events.snapshot import UnpersistedEventContext
from synapse.events.utils import EventFormat
from synapse.federation.federation_base import event_from_pdu_json
from synapse.handlers.sync import SyncConfig
from synapse.logging.context import (
    LoggingContext,
    defer_to_thread,
    make_deferred_yieldable,
    run_in_background,
)
from synapse.storage.database import DatabasePool, LoggingTransaction
from synapse.streams.config import PaginationConfig
from synapse.types import StreamToken, UserID, create_requester
from synapse.util.caches.expiringcache import ExpiringCache
from synapse.util.caches.lrucache import LruCache
from synapse.util.duration import Duration
from synapse.util.json import json_decoder
from synapse.visibility import filter_and_transform_events_for_client
from twisted.internet import defer, reactor

Answer = dict[str, Any]

CONFIG: Final = {
    "report_stats": False,
    "listeners": [],
    "federation_domain_whitelist": [],
    "trusted_key_servers": [],
    "pid_file": None,
    "suppress_key_server_warning": True,
    "enable_registration": False,
    "macaroon_secret_key": "of a benchmark",
    "form_secret": "of a benchmark",
    "registration_shared_secret": "of a benchmark",
}
LOGGING: Final = "version: 1\ndisable_existing_loggers: false\nroot: {level: WARNING}\n"


class CountedStatements:
    """Statements and transactions so far.

    One call that sends several pages of rows counts as one statement.
    """

    statements = 0
    transactions = 0

    @classmethod
    def begin(cls) -> None:
        """Count from now on, where every statement and every transaction passes."""
        execute, transaction = LoggingTransaction._do_execute, DatabasePool.new_transaction

        def counted_execute(*args: Any, **kwargs: Any) -> Any:
            cls.statements += 1
            return execute(*args, **kwargs)

        def counted_transaction(*args: Any, **kwargs: Any) -> Any:
            cls.transactions += 1
            return transaction(*args, **kwargs)

        LoggingTransaction._do_execute = counted_execute
        DatabasePool.new_transaction = counted_transaction


@contextmanager
def measured(answer: Answer) -> Iterator[None]:
    """Measure the block: clock, CPU of this process, statements and transactions."""
    statements, transactions = CountedStatements.statements, CountedStatements.transactions
    cpu, clock = time.process_time(), time.perf_counter()
    yield
    answer["seconds"], answer["python_seconds"] = (
        time.perf_counter() - clock,
        time.process_time() - cpu,
    )
    answer["statements"], answer["transactions"] = (
        CountedStatements.statements - statements,
        CountedStatements.transactions - transactions,
    )


def own_homeserver(given: Answer) -> SynapseHomeServer:
    """Create the server on the given database, with the schema that it prepares itself."""
    folder = Path(given["folder"])
    logging = folder / "log.yaml"
    logging.write_text(LOGGING, encoding="utf-8")
    keys = folder / "signing.key"
    keys.write_text(given["signing_key"] + "\n", encoding="utf-8")
    database: Answer = {"name": "sqlite3", "args": {"database": str(folder / "synapse.db")}}
    if "host" in given:
        args = {name: given[name] for name in ("host", "port", "user", "database")}
        database = {"name": "psycopg2", "args": args}
    config = HomeServerConfig()
    own = {
        "server_name": given["server_name"],
        "database": database,
        "log_config": str(logging),
        "signing_key_path": str(keys),
    }
    config.parse_config_dict(
        CONFIG | own | _listening(given) | {"media_store_path": str(folder)},
        str(folder),
        str(folder),
    )
    hs = create_homeserver(config)
    setup(hs)
    return hs


def _listening(given: Answer) -> Answer:
    """Return the settings of a server with clients. Its cache of whole responses is off."""
    if "client_port" not in given:
        return {}
    listener = {
        "port": given["client_port"],
        "type": "http",
        "bind_addresses": ["127.0.0.1"],
        "resources": [{"names": ["client"], "compress": False}],
    }
    return {"listeners": [listener], "caches": {"sync_response_cache_duration": "0s"}}


class Peer:
    """The commands, by name."""

    def __init__(self, hs: SynapseHomeServer) -> None:
        self.hs = hs
        self.store = hs.get_datastores().main
        self.controllers = hs.get_storage_controllers()
        self.room_versions: dict[str, Any] = {}
        self.clients: list[list[list[str]]] = []
        self.tips: dict[
            str, tuple[int, dict[Any, str]]
        ] = {}  # of linear rooms stored in batches: the last group and state
        self.requests = 0
        self.caches: list[LruCache[Any, Any] | ExpiringCache[Any, Any]] = []

    # ---------------------------------------------------------------------------------------------
    # writing

    async def versions(self) -> Answer:
        names = ("matrix-synapse", "twisted", "psycopg2-binary")
        return {
            "python": sys.version.split()[0],
            "packages": {name: version(name) for name in names},
        }

    async def room(self, room_id: str, room_version: str) -> Answer:
        """Register a room, as an invite or a join would."""
        self.room_versions[room_id] = KNOWN_ROOM_VERSIONS[room_version]
        await self.store.maybe_store_room_on_outlier_membership(
            room_id, KNOWN_ROOM_VERSIONS[room_version]
        )
        return {}

    async def load(self, path: str) -> Answer:
        """Read the input of the next `persist`.

        The file has a line per batch: `{"client": number, "pdus": [text, …]}`.
        """
        self.clients = []
        # blocking is fine: nothing else is waiting
        text = Path(path).read_text(encoding="utf-8")  # noqa: ASYNC240
        for line in text.splitlines():
            batch = json.loads(line)
            while len(self.clients) <= batch["client"]:
                self.clients.append([])
            self.clients[batch["client"]].append(batch["pdus"])
        return {"batches": sum(map(len, self.clients))}

    async def persist(self, how: str) -> Answer:
        """Store the loaded batches; each client stores the next when the last is done.

        `how`: one of `single`, `linear`, `steps`, `receive`.
        """
        store = {
            "single": self._single,
            "linear": self._linear,
            "steps": self._steps,
            "receive": self._receive,
        }[how]
        answer: Answer = {"latencies": []}
        with measured(answer):
            running = [
                run_in_background(self._client, batches, store, answer["latencies"])
                for batches in self.clients
            ]
            await make_deferred_yieldable(defer.gatherResults(running, consumeErrors=True))
        return answer

    async def _client(
        self,
        batches: list[list[str]],
        store: Callable[[list[Any]], Awaitable[None]],
        latencies: list[float],
    ) -> None:
        with LoggingContext(name="client", server_name=self.hs.hostname):
            for batch in batches:
                start = time.perf_counter()
                await store([self._event(pdu) for pdu in batch])
                latencies.append(time.perf_counter() - start)

    def _event(self, pdu: str) -> Any:
        fields = json_decoder.decode(pdu)
        if "room_id" not in fields:  # a create event whose own id names the room
            return event_from_pdu_json(
                fields, KNOWN_ROOM_VERSIONS[fields["content"]["room_version"]]
            )
        return event_from_pdu_json(fields, self.room_versions[fields["room_id"]])

    async def _single(self, events: list[Any]) -> None:
        """Store with state before, state group and persist.

        There is no authorisation, no signature check, no push and no notification.
        """
        for event in events:
            context = await self.hs.get_state_handler().compute_event_context(event)
            await self.controllers.persistence.persist_event(event, context)

    async def _receive(self, events: list[Any]) -> None:
        """Store as from a transaction of another server, after its signatures.

        That is authorisation, soft-fail check, push rules, persist and notification.
        """
        for event in events:
            await self.hs.get_federation_event_handler().on_receive_pdu(
                event.sender.split(":", 1)[1], event
            )

    async def _linear(self, events: list[Any]) -> None:
        """Store a chain of events at once, as for the first events of a new room."""
        room_id = events[0].room_id
        if room_id not in self.tips:
            await self._single(events[:1])
            self.tips[room_id] = await self._tip(events[0])
            events = events[1:]
        group, state = self.tips[room_id]
        made = []
        for event in events:
            context = await self.hs.get_state_handler().calculate_context_info(
                event,
                state_ids_before_event=dict(state),
                partial_state=False,
                state_group_before_event=group,
            )
            made.append((event, context))
            if event.is_state():
                state[event.type, event.state_key] = event.event_id
        if made:
            pairs = await UnpersistedEventContext.batch_persist_unpersisted_contexts(
                made, room_id, group, self.controllers.state.stores.state
            )
            await self.controllers.persistence.persist_events(pairs)
            self.tips[room_id] = (pairs[-1][1].state_group, state)

    async def _steps(self, events: list[Any]) -> None:
        """Store a chain, but its first event as if it came alone.

        So a whole state is written every hundredth change, as usual.
        """
        self.tips.pop(events[0].room_id, None)
        await self._linear(events)

    async def _tip(self, event: Any) -> tuple[int, dict[Any, str]]:
        groups = await self.controllers.state.get_state_group_for_events([event.event_id])
        group = groups[event.event_id]
        return group, dict(await self.controllers.state.get_state_ids_for_group(group))

    # ---------------------------------------------------------------------------------------------
    # reading

    async def register(self, user_id: str) -> Answer:
        await self.store.register_user(user_id)
        return {}

    async def log_in(self, user_id: str, token: str) -> Answer:
        """Register a user with a device and its access token."""
        await self.store.register_user(user_id)
        await self.store.store_device(user_id, "BENCH", None)
        await self.store.add_access_token_to_user(user_id, token, "BENCH", None)
        return {}

    async def still(self) -> Answer:
        """Collect garbage, and take what is left out of the next collections, as the other side.

        The caches are looked for here, long before a question is timed: after a walk over the
        heap a short answer takes longer.
        """
        gc.unfreeze()
        self.caches = [one for one in gc.get_objects() if isinstance(one, LruCache | ExpiringCache)]
        gc.collect()
        gc.freeze()
        return {"caches": len(self.caches)}

    async def forget(self) -> Answer:
        """Empty its caches: all bounded ones, and the events that are still referenced.

        Positions of streams stay known.
        """
        for one in self.caches:
            if isinstance(one, LruCache):
                one.clear()
            else:
                one._cache.clear()
        self.store._event_ref.clear()
        return {}

    async def settle(self, quiet_seconds: float, timeout_seconds: float) -> Answer:
        """Wait until its background work (user directory, statistics) has been idle for a time.

        ``timeout_seconds`` limits the wait.
        """
        start = time.perf_counter()
        while True:
            before = CountedStatements.statements
            await self.hs.get_clock().sleep(Duration(seconds=quiet_seconds))
            if (
                CountedStatements.statements == before
                or time.perf_counter() - start > timeout_seconds
            ):
                return {
                    "seconds": time.perf_counter() - start,
                    "quiet": CountedStatements.statements == before,
                }

    async def token(self) -> Answer:
        """Return the token of a client that is up to date."""
        return {
            "token": await self.hs.get_event_sources().get_current_token().to_string(self.store)
        }

    async def ask(self, what: str, **given: Any) -> Answer:
        """Run a query by name and measure it; `answer` is for a comparison."""
        answer: Answer = {}
        with measured(answer):
            found = await getattr(self, f"_ask_{what}")(**given)
        return answer | {"answer": found() if callable(found) else found}

    async def _ask_sync(self, user_id: str, since: str | None, limit: int) -> Any:
        self.requests += 1
        config = SyncConfig(
            user=UserID.from_string(user_id),
            filter_collection=FilterCollection(self.hs, {"room": {"timeline": {"limit": limit}}}),
            is_guest=False,
            device_id=None,
            use_state_after=False,
        )
        token = None if since is None else await StreamToken.from_string(self.store, since)
        handler = self.hs.get_sync_handler()
        told = await handler.wait_for_sync_for_user(
            create_requester(user_id), config, (user_id, self.requests), since_token=token
        )
        return lambda: {
            room.room_id: [one.event.event_id for one in room.timeline.events]
            for room in told.joined
        }

    async def _ask_messages(self, room_id: str, user_id: str, start: str | None, limit: int) -> Any:
        token = None if start is None else await StreamToken.from_string(self.store, start)
        config = PaginationConfig(
            from_token=token, to_token=None, direction=Direction.BACKWARDS, limit=limit
        )
        page = await self.hs.get_pagination_handler().get_messages(
            create_requester(user_id), room_id, config
        )
        end = page.end_token and await page.end_token.to_string(self.store)
        return lambda: {"ids": [one.event.event_id for one in page.messages_chunk], "end": end}

    async def client_events(self, user_id: str, event_ids: list[str]) -> Answer:
        """Return those of the events that a user may see, as a page of messages has them."""
        events = await self.store.get_events_as_list(event_ids, get_prev_content=True)
        seen = await filter_and_transform_events_for_client(self.controllers, user_id, events)
        bundles = await self.hs.get_relations_handler().get_bundled_aggregations(seen, user_id)
        serializer = self.hs.get_event_client_serializer()
        config = await serializer.create_config(
            event_format=EventFormat.ClientV2, requester=create_requester(user_id)
        )
        now = self.hs.get_clock().time_msec()
        return {
            "events": await serializer.serialize_events(
                seen, now, config=config, bundle_aggregations=bundles
            )
        }

    async def _ask_backfill(self, room_id: str, event_id: str, limit: int, server: str) -> Any:
        events = await self.hs.get_federation_handler().on_backfill_request(
            server, room_id, [event_id], limit
        )
        return lambda: [event.event_id for event in events]

    async def _ask_missing(self, room_id: str, event_id: str, limit: int, server: str) -> Any:
        events = await self.hs.get_federation_handler().on_get_missing_events(
            server, room_id, [], [event_id], limit
        )
        return lambda: [event.event_id for event in events]

    async def _ask_state_before(self, room_id: str, event_id: str) -> Any:
        return list(await self.hs.get_federation_handler().get_state_ids_for_pdu(room_id, event_id))

    async def _ask_state_ids(self, room_id: str, event_id: str) -> Any:
        state = await self.hs.get_federation_handler().get_state_ids_for_pdu(room_id, event_id)
        chain = await self.store.get_auth_chain_ids(room_id, state)
        return lambda: {"state": list(state), "chain": list(chain)}

    async def _ask_auth_chain(self, room_id: str, event_ids: list[str]) -> Any:
        return list(await self.store.get_auth_chain_ids(room_id, event_ids))

    async def _ask_auth_difference(self, room_id: str, sets: list[list[str]]) -> Any:
        return list(await self.store.get_auth_chain_difference(room_id, [set(one) for one in sets]))


# ------------------------------------------------------------------------------------------------
# the loop


async def serve(peer: Peer) -> None:
    """Respond line by line until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8", buffering=1)
    os.dup2(2, 1)  # the server's output is no result
    answers.write(json.dumps({"ready": True}) + "\n")
    while line := await defer_to_thread(reactor, sys.stdin.readline):
        given = json.loads(line)
        command = getattr(peer, given.pop("do"))
        try:
            answer = await command(**given)
        except Exception:  # noqa: BLE001  # returned to the caller, who raises it
            answer = {"error": traceback.format_exc()}
        answers.write(json.dumps(answer) + "\n")


def main() -> None:
    """Start, serve, stop."""
    given = json.loads(sys.argv[1])
    CountedStatements.begin()
    failed: list[BaseException] = []

    async def run() -> None:
        with LoggingContext(name="driver", server_name=given["server_name"]):
            try:
                await start(hs)
                await serve(Peer(hs))
            except BaseException as error:
                failed.append(error)
                raise
            finally:
                reactor.stop()

    with LoggingContext(name="main", server_name=given["server_name"]):
        hs = own_homeserver(given)
        reactor.callWhenRunning(lambda: defer.ensureDeferred(run()))
    reactor.run()
    if failed:
        raise failed[0]


if __name__ == "__main__":
    main()
