"""The streams: their writers with positions and lag, and the vector and linear position.

Reads: `Store.streams` for what this process knows; `storage.queries.inspect.writers` for the table.
"""

from collections import defaultdict

from starlette.responses import Response

from storage.inspector.visit import Visit
from storage.queries.inspect.writers import WriterPositionRow, lost_ranges, purged_streams, writers


async def page(visit: Visit) -> Response:
    by_stream: dict[str, list[WriterPositionRow]] = defaultdict(list)
    for row in await visit.read(writers):
        by_stream[row.stream_name].append(row)
    store = visit.store
    known = {
        name: {
            "linear": stream.linear(),
            "vector": stream.current(),
            "positions": stream.positions(),
            "writers": by_stream.get(name, []),
        }
        for name, stream in sorted(store.streams.items())
    }
    return visit.render(
        "streams.html",
        streams=known,
        purged=await visit.read(purged_streams),
        lost=await visit.read(lost_ranges),
        instance_name=store.instance_name,
        read_only=store.reads.read_only,
    )
