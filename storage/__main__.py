"""`python -m storage`: the same as `room-storage`."""

import sys

from storage.cli import main

sys.exit(main())
