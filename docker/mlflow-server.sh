#!/usr/bin/env bash
# Starts an MLflow server with a database, artifacts in a folder and basic auth. The image runs this, and so do the tests.
#
#   MLFLOW_BACKEND_STORE_URI       postgresql://USER@HOST:PORT/DATABASE (or sqlite:////FILE); needed
#   MLFLOW_ARTIFACTS_DESTINATION   folder (or bucket) that the server keeps artifacts in; needed
#   MLFLOW_ADMIN_PASSWORD_FILE     its first line is the administrator's password, 12 characters or more; needed at
#                                  the first start on a database, later the password lives there
#   MLFLOW_AUTH_ADMIN_USERNAME     the administrator's name; admin
#   MLFLOW_DATABASE_PASSWORD_FILE  its first line is the database's password, so that no URI has to carry it
#   MLFLOW_AUTH_DATABASE_URI       where users are kept; MLFLOW_BACKEND_STORE_URI
#   MLFLOW_HOST, MLFLOW_PORT       127.0.0.1, 5000
#   MLFLOW_WORKERS                 1: with more, every answer of this MLflow waits 45 ms for TCP (docs/docker.md)
#   MLFLOW_SERVER_ALLOWED_HOSTS    names under which clients reach it, with and without the port: mlflow:5000,mlflow
#   MLFLOW_AUTH_CACHE_SECONDS      how long a checked password is trusted; 300. At 0 each request costs 0.2 s of hashing
#   MLFLOW_DEFAULT_PERMISSION      what a user may do with what others made: READ, USE, EDIT, MANAGE or NO_PERMISSIONS
set -euo pipefail

fail() {
    echo "mlflow-server.sh: $*" >&2
    exit 2
}

secret() {
    [ -r "$2" ] || fail "$1=$2: cannot be read by user $(id -u)"
    local line
    IFS= read -r line <"$2" || [ -n "$line" ] || fail "$1=$2: is empty"
    printf '%s' "${line%$'\r'}"
}

: "${MLFLOW_BACKEND_STORE_URI:=}" "${MLFLOW_ARTIFACTS_DESTINATION:=}"
[ -n "$MLFLOW_BACKEND_STORE_URI" ] || fail "MLFLOW_BACKEND_STORE_URI is not set: postgresql://USER@HOST:PORT/DATABASE"
[ -n "$MLFLOW_ARTIFACTS_DESTINATION" ] || fail "MLFLOW_ARTIFACTS_DESTINATION is not set: the folder for artifacts"
command -v mlflow >/dev/null || fail "there is no mlflow on PATH: pip install 'ortlaunch[server]'"

# By environment, where MLflow and libpq read them: a command line can be seen by every user of the machine.
export MLFLOW_BACKEND_STORE_URI MLFLOW_ARTIFACTS_DESTINATION
export MLFLOW_HOST="${MLFLOW_HOST:-127.0.0.1}" MLFLOW_PORT="${MLFLOW_PORT:-5000}" MLFLOW_WORKERS="${MLFLOW_WORKERS:-1}"
if [ -n "${MLFLOW_DATABASE_PASSWORD_FILE:-}" ]; then
    PGPASSWORD=$(secret MLFLOW_DATABASE_PASSWORD_FILE "$MLFLOW_DATABASE_PASSWORD_FILE")
    export PGPASSWORD
fi
if [ -n "${MLFLOW_ADMIN_PASSWORD_FILE:-}" ]; then
    MLFLOW_AUTH_ADMIN_PASSWORD=$(secret MLFLOW_ADMIN_PASSWORD_FILE "$MLFLOW_ADMIN_PASSWORD_FILE")
    export MLFLOW_AUTH_ADMIN_PASSWORD
fi

umask 077
folder=$(mktemp -d "${TMPDIR:-/tmp}/mlflow-server.XXXXXX")
# A % in an INI file begins an interpolation.
users=${MLFLOW_AUTH_DATABASE_URI:-$MLFLOW_BACKEND_STORE_URI}
cat >"$folder/basic_auth.ini" <<INI
[mlflow]
default_permission = ${MLFLOW_DEFAULT_PERMISSION:-READ}
database_uri = ${users//%/%%}
admin_username = ${MLFLOW_AUTH_ADMIN_USERNAME:-admin}
authorization_function = mlflow.server.auth:authenticate_request_basic_auth
grant_default_workspace_access = false
auth_cache_ttl_seconds = ${MLFLOW_AUTH_CACHE_SECONDS:-300}
INI
export MLFLOW_AUTH_CONFIG_PATH="$folder/basic_auth.ini"
# Signs forms and sessions; the same in all workers, new at each start.
MLFLOW_FLASK_SERVER_SECRET_KEY=${MLFLOW_FLASK_SERVER_SECRET_KEY:-$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')}
export MLFLOW_FLASK_SERVER_SECRET_KEY
export MLFLOW_DISABLE_TELEMETRY=true
# Eleven processes and 2.5 GiB for services that a launcher's record does not use.
export MLFLOW_SERVER_ENABLE_JOB_EXECUTION="${MLFLOW_SERVER_ENABLE_JOB_EXECUTION:-false}"

exec mlflow server --app-name basic-auth --serve-artifacts
