"""Copy storage/database/schema.sql into the first migration: `python migrations/freeze.py`, until the first release."""

import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

if __name__ == "__main__":
    shutil.copyfile(ROOT / "storage/database/schema.sql", ROOT / "migrations/versions/0001_initial.sql")
