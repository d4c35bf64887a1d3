"""Projects, their members, and whose jobs are whose."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    """Adds the table and the columns. Users and jobs of before belong to no project."""
    op.create_table("projects", sa.Column("name", sa.String(64), primary_key=True), sa.Column("slots", sa.Float))
    op.add_column("users", sa.Column("projects", sa.JSON, nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("project", sa.String(64), nullable=False, server_default=""))
