#!/usr/bin/env bash
# Makes the secrets of compose.yaml where they are missing: random passwords of the database and of MLflow's administrator.
#
#   docker/secrets.sh [FOLDER]   docker/secrets by default; it may only be entered by who made it
set -euo pipefail

folder=${1:-$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)/secrets}
mkdir -p "$folder"
chmod 700 "$folder"
for name in database_password admin_password; do
    [ -s "$folder/$name" ] || od -An -N24 -tx1 /dev/urandom | tr -d ' \n' >"$folder/$name"
    # The containers' users are others than yours, and see the file without its folder.
    chmod 644 "$folder/$name"
done
echo "$folder: database_password, admin_password"
