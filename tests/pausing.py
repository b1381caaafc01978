"""A short pause for a test that asks again and again until something has happened.

Without it, the test and the server that it asks use up the processors.
"""

import asyncio

PAUSE_S = 0.01


async def pause() -> None:
    """Wait before asking again."""
    await asyncio.sleep(PAUSE_S)
