"""Jobs that were sent together as a sweep."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Adds the column. Jobs of before are single runs."""
    op.add_column("jobs", sa.Column("sweep", sa.String(16)))
    op.create_index("ix_jobs_sweep", "jobs", ["sweep"])
