"""Titles, tags and notes of runs."""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Adds the table."""
    op.create_table(
        "run_notes",
        sa.Column("place", sa.Text, primary_key=True),
        sa.Column("title", sa.String, nullable=False),
        sa.Column("tags", sa.JSON, nullable=False),
        sa.Column("note", sa.String, nullable=False),
    )
