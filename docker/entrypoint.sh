#!/usr/bin/env bash
# What the images start: ortlaunch, with the password of the tracking server taken from a file where one is named.
#
#   MLFLOW_TRACKING_PASSWORD_FILE   its first line becomes MLFLOW_TRACKING_PASSWORD
set -euo pipefail

if [ -n "${MLFLOW_TRACKING_PASSWORD_FILE:-}" ]; then
    [ -r "$MLFLOW_TRACKING_PASSWORD_FILE" ] || {
        echo "entrypoint.sh: MLFLOW_TRACKING_PASSWORD_FILE=$MLFLOW_TRACKING_PASSWORD_FILE: cannot be read by user $(id -u)" >&2
        exit 2
    }
    IFS= read -r MLFLOW_TRACKING_PASSWORD <"$MLFLOW_TRACKING_PASSWORD_FILE" || [ -n "$MLFLOW_TRACKING_PASSWORD" ]
    export MLFLOW_TRACKING_PASSWORD
fi
exec ortlaunch "$@"
