"""Whom an OpenID Connect provider means by a user."""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"


def upgrade() -> None:
    """Adds the column. The first login of each user fills it."""
    op.add_column("users", sa.Column("subject", sa.String))
    op.create_index("users_subject", "users", ["subject"], unique=True)
