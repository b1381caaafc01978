"""The disk usage of whole rooms here and in Synapse, as in benchmarks/peer.py, without the rest.

Run `python -m benchmarks peer_disk [--quick]`.
"""

from benchmarks.harness import Bench, note
from benchmarks.peer import both, store_storm
from benchmarks.peers import reads


async def run(bench: Bench) -> None:
    """Store small rooms, a large one and a storm on both sides."""
    async with both(bench) as sides:
        note("storing rooms")
        bench.results |= await reads.store(sides, reads.build(bench))
        bench.results |= await store_storm(bench, sides)
