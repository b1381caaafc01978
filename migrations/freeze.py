"""Copy today's schema and grants into the first migrations, until the first release.

python migrations/freeze.py
"""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIES = {"schema.sql": "0001_initial.sql", "grants.sql": "0002_roles.sql"}

if __name__ == "__main__":
    for name, copy in COPIES.items():
        shutil.copyfile(ROOT / "storage/database" / name, ROOT / "migrations/versions" / copy)
