"""The list of runs is in memory, and a command is told of ends: the index and the webhooks with their keys go."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Drops the tables. Runs are read from their folders."""
    for table in ("deliveries", "webhooks", "runs"):
        op.drop_table(table)
