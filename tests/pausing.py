"""The pause between two looks at something that tells nobody.

Without it, the test and the server that it asks take the processors from all others.
"""

import asyncio

PAUSE_S = 0.01


async def pause() -> None:
    """Wait before looking again."""
    await asyncio.sleep(PAUSE_S)
