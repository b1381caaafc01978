"""A later release, as far as the database sees it.

A folder of its own has the migrations of today and four steps more, or the two of
`example_migrations/`, which can be undone.
"""

import shutil
from pathlib import Path

from storage.database.migrate import HEAD_REVISION, MigrationOptions, scripts_directory

COLUMN = f'''"""A column that old code does not look at."""
from alembic import op
revision, down_revision, phase = "9001", "{HEAD_REVISION}", "pre"
def upgrade():
    op.execute("ALTER TABLE events ADD COLUMN json_bytes int")
'''
INDEX = '''"""An index on what is there."""
from storage.database.migration_steps import index_concurrently
revision, down_revision, phase = "9002", "9001", "pre"
def upgrade():
    index_concurrently("events_depth_idx", "ON events (depth)")
'''
DATA = '''"""What fills the column."""
from storage.database.background import Job
from storage.database.migration_steps import background_job
revision, down_revision, phase = "9003", "9002", "pre"
BATCH = """
WITH part AS (SELECT event_nid FROM events WHERE event_nid > $1::bigint ORDER BY event_nid
    LIMIT $2::int),
filled AS (UPDATE events e SET json_bytes = octet_length(e.json) FROM part p
    WHERE e.event_nid = p.event_nid)
SELECT count(*)::int AS rows, max(event_nid) AS place FROM part
"""
job = Job("fill json_bytes", batch=BATCH, expected="SELECT count(*) FROM events")
def upgrade():
    background_job(job, revision)
'''
DEMAND = '''"""What old code does not write is wanted from here on."""
from alembic import op
from storage.database.migration_steps import require_job
revision, down_revision, phase = "9004", "9003", "post"
def upgrade():
    require_job("fill json_bytes")
    op.execute(
        "ALTER TABLE events ADD CONSTRAINT events_json_bytes_check"
        " CHECK (json_bytes IS NOT NULL) NOT VALID"
    )
'''
JOB, LAST_PRE, HEAD = "fill json_bytes", "9003", "9004"
EXAMPLES = Path(__file__).parent / "example_migrations"


def newer_release(folder: Path, **steps: str) -> MigrationOptions:
    """The folder with the steps of the release, or with others: name of the file to source."""
    shutil.copytree(scripts_directory(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    for name, source in (
        steps
        or {"9001_column": COLUMN, "9002_index": INDEX, "9003_data": DATA, "9004_demand": DEMAND}
    ).items():
        (folder / "versions" / f"{name}.py").write_text(source)
    return MigrationOptions(scripts=folder)


def example_release(folder: Path) -> Path:
    """A folder of migrations with the two examples: 9001 (pre, with a job) and 9002 (post)."""
    scripts = newer_release(
        folder, **{path.stem: path.read_text("utf-8") for path in EXAMPLES.glob("*.py")}
    ).scripts
    assert scripts is not None
    return scripts
