"""How many examples the random tests of this folder take: some hundreds, or STORAGE_EXAMPLES.

The long run: STORAGE_EXAMPLES=10000 pytest tests/auth --timeout 0
"""

import os

from hypothesis import HealthCheck, settings

EXAMPLES = int(os.environ.get("STORAGE_EXAMPLES", "200"))

thorough = settings(
    max_examples=EXAMPLES,
    deadline=None,
    database=None,
    derandomize=EXAMPLES
    <= 200,  # the quick run is the same everywhere; the long one looks for something new
    suppress_health_check=[HealthCheck.too_slow],
)
