"""What Alembic executes for each command: it works in the transaction of `ortlaunch.serve.database`."""

from alembic import context

context.configure(connection=context.config.attributes["connection"])
context.run_migrations()
