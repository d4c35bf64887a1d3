#!/usr/bin/env bash
# What the images start: ortlaunch, with the password of the tracking server taken from a file where one is named.
#
#   MLFLOW_TRACKING_PASSWORD_FILE   its first line becomes MLFLOW_TRACKING_PASSWORD
set -euo pipefail

fail() {
    echo "entrypoint.sh: MLFLOW_TRACKING_PASSWORD_FILE=$MLFLOW_TRACKING_PASSWORD_FILE: $*" >&2
    exit 2
}

if [ -n "${MLFLOW_TRACKING_PASSWORD_FILE:-}" ]; then
    [ -r "$MLFLOW_TRACKING_PASSWORD_FILE" ] || fail "cannot be read by user $(id -u)"
    IFS= read -r line <"$MLFLOW_TRACKING_PASSWORD_FILE" || [ -n "$line" ] || fail "is empty"
    # As mlflow-server.sh reads the same file.
    export MLFLOW_TRACKING_PASSWORD="${line%$'\r'}"
fi
exec ortlaunch "$@"
