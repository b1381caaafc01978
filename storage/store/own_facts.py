"""Calls for the homeserver's own facts: streams that it defines."""

from storage.store.core import StoreCore
from storage.streams.defined_streams import DefinedStream


def define_stream(store: StoreCore, name: str, *, keep_ms: int | None = None) -> DefinedStream:
    """Define a stream of the homeserver's own facts, such as "typing"; call it once at start.

    A name has 1 to 40 of a-z, 0-9, "_", "." and "-". From now on the tokens of `Store.sync` have
    the position of the stream, and its facts wake waiting syncs. Define a stream in each process
    that serves /sync. No ``await`` is needed: the first use enters the stream as a writer. Await
    the result to do that at once.

    ``keep_ms`` is how long facts are kept at least; None: the latest of each key for ever. A second
    call changes ``keep_ms`` alone. `InputError`.
    """
    return store.defined_streams.define(name, keep_ms)


def stream(store: StoreCore, name: str) -> DefinedStream:
    """Return a stream that this process has defined. `UnknownStream`."""
    return store.defined_streams.named(name)
