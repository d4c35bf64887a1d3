"""The tables of the first release. A database that was made before there were migrations has them already."""

from alembic import op

revision = "0001"
down_revision = None
_TABLES = """\
CREATE TABLE users (
    id INTEGER NOT NULL, name VARCHAR NOT NULL, role VARCHAR NOT NULL, unix_user VARCHAR, password VARCHAR,
    disabled BOOLEAN NOT NULL, created DOUBLE NOT NULL, PRIMARY KEY (id), UNIQUE (name)
);
CREATE TABLE audit (
    id INTEGER NOT NULL, at DOUBLE NOT NULL, user_id INTEGER, user VARCHAR NOT NULL, action VARCHAR NOT
    NULL, target VARCHAR NOT NULL, detail VARCHAR NOT NULL, PRIMARY KEY (id)
);
CREATE INDEX audit_at ON audit (at);
CREATE TABLE jobs (
    id VARCHAR(16) NOT NULL, number INTEGER NOT NULL, user_id INTEGER NOT NULL, owner VARCHAR(64) NOT NULL,
    unix_user VARCHAR(64) NOT NULL, state VARCHAR(16) NOT NULL, reason TEXT NOT NULL, slots INTEGER NOT
    NULL, minutes FLOAT, priority INTEGER NOT NULL, submitted FLOAT NOT NULL, started FLOAT, ended FLOAT,
    taken JSON NOT NULL, name TEXT NOT NULL, experiment TEXT NOT NULL, launcher VARCHAR(64) NOT NULL, steps
    INTEGER, run_id VARCHAR(16) NOT NULL, run_key VARCHAR(64) NOT NULL, run_dir TEXT NOT NULL, resumes
    BOOLEAN NOT NULL, request JSON NOT NULL, words JSON NOT NULL, pid INTEGER, ticks INTEGER, machine TEXT
    NOT NULL, token VARCHAR(32) NOT NULL, attempts INTEGER NOT NULL, begun_before INTEGER NOT NULL,
    stop_asked FLOAT, outcome VARCHAR(16) NOT NULL, PRIMARY KEY (id), UNIQUE (number)
);
CREATE INDEX ix_jobs_run_id ON jobs (run_id);
CREATE INDEX jobs_by_state ON jobs (state, number);
CREATE INDEX ix_jobs_user_id ON jobs (user_id);
CREATE INDEX ix_jobs_owner ON jobs (owner);
CREATE TABLE queue_settings (name VARCHAR(32) NOT NULL, value TEXT NOT NULL, PRIMARY KEY (name));
CREATE TABLE usage (
    owner VARCHAR(64) NOT NULL, slot_seconds FLOAT NOT NULL, at FLOAT NOT NULL, PRIMARY KEY (owner)
);
CREATE TABLE runs (
    place TEXT NOT NULL, "key" VARCHAR(64) NOT NULL, run_id VARCHAR(64) NOT NULL, name TEXT NOT NULL,
    experiment TEXT NOT NULL, unix_user VARCHAR(64) NOT NULL, owner TEXT NOT NULL, job VARCHAR(16), state
    VARCHAR(16) NOT NULL, reason TEXT NOT NULL, is_over BOOLEAN NOT NULL, step BIGINT, steps BIGINT, loss
    FLOAT, diverged BOOLEAN NOT NULL, rate FLOAT, rate_unit VARCHAR(16) NOT NULL, seconds_left FLOAT,
    started FLOAT NOT NULL, updated FLOAT NOT NULL, ended FLOAT, launcher VARCHAR(64) NOT NULL,
    scheduler_job VARCHAR(300) NOT NULL, nodes INTEGER NOT NULL, restarts INTEGER NOT NULL, checkpoint
    VARCHAR(64) NOT NULL, unsent BIGINT NOT NULL, changed BIGINT NOT NULL, PRIMARY KEY (place)
);
CREATE INDEX ix_runs_run_id ON runs (run_id);
CREATE INDEX ix_runs_owner ON runs (owner);
CREATE INDEX ix_runs_unix_user ON runs (unix_user);
CREATE INDEX runs_by_start ON runs (started);
CREATE INDEX runs_by_state ON runs (state, started);
CREATE INDEX ix_runs_key ON runs ("key");
CREATE INDEX ix_runs_experiment ON runs (experiment);
CREATE TABLE webhooks (
    id INTEGER NOT NULL, url TEXT NOT NULL, secret TEXT NOT NULL, made_by VARCHAR(64) NOT NULL, made FLOAT
    NOT NULL, PRIMARY KEY (id)
);
CREATE TABLE sessions (
    id INTEGER NOT NULL, user_id INTEGER NOT NULL, digest VARCHAR NOT NULL, created DOUBLE NOT NULL, used
    DOUBLE NOT NULL, expires DOUBLE NOT NULL, PRIMARY KEY (id), FOREIGN KEY(user_id) REFERENCES users (id)
    ON DELETE CASCADE, UNIQUE (digest)
);
CREATE INDEX ix_sessions_user_id ON sessions (user_id);
CREATE TABLE tokens (
    id INTEGER NOT NULL, user_id INTEGER NOT NULL, name VARCHAR NOT NULL, digest VARCHAR NOT NULL, role
    VARCHAR NOT NULL, created DOUBLE NOT NULL, expires DOUBLE NOT NULL, revoked DOUBLE, PRIMARY KEY (id),
    FOREIGN KEY(user_id) REFERENCES users (id) ON DELETE CASCADE, UNIQUE (digest)
);
CREATE INDEX ix_tokens_user_id ON tokens (user_id);
CREATE TABLE links (
    id INTEGER NOT NULL, user_id INTEGER, digest VARCHAR NOT NULL, expires DOUBLE NOT NULL, PRIMARY KEY
    (id), FOREIGN KEY(user_id) REFERENCES users (id) ON DELETE CASCADE, UNIQUE (digest)
);
CREATE INDEX ix_links_user_id ON links (user_id);
CREATE TABLE requests (
    id INTEGER NOT NULL, user_id INTEGER NOT NULL, "key" VARCHAR(200) NOT NULL, digest VARCHAR(64) NOT NULL,
    job_id VARCHAR(16) NOT NULL, at FLOAT NOT NULL, PRIMARY KEY (id), UNIQUE (user_id, "key"), FOREIGN
    KEY(job_id) REFERENCES jobs (id)
);
CREATE INDEX ix_requests_at ON requests (at);
CREATE TABLE deliveries (
    id INTEGER NOT NULL, webhook_id INTEGER NOT NULL, place TEXT NOT NULL, ended FLOAT NOT NULL, body TEXT
    NOT NULL, tries INTEGER NOT NULL, due FLOAT, delivered FLOAT, problem TEXT NOT NULL, PRIMARY KEY (id),
    UNIQUE (webhook_id, place, ended), FOREIGN KEY(webhook_id) REFERENCES webhooks (id) ON DELETE CASCADE
);
CREATE INDEX deliveries_due ON deliveries (delivered, due)
"""


def upgrade() -> None:
    """Makes the tables."""
    for statement in _TABLES.split(";\n"):
        op.execute(statement)
