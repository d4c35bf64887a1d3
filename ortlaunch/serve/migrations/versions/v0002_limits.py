"""What each role may take of the machine, what a job needs of it, and what it is stopped at."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Adds the table and the columns. Jobs of before need their slots alone."""
    op.create_table(
        "limits",
        sa.Column("role", sa.String(16), primary_key=True),
        *(sa.Column(name, sa.Float) for name in ("slots", "hours", "memory", "disk")),
    )
    op.add_column("jobs", sa.Column("needs", sa.JSON, nullable=False, server_default="{}"))
    op.add_column("jobs", sa.Column("limits", sa.JSON, nullable=False, server_default="{}"))
