#!/usr/bin/env bash
# Builds the CPU image and proves it: doctor and a training run in it, then compose.yaml's server, database and training
# under a project name of their own. What it starts it ends, and its volumes go with it. From the root of a checkout:
#
#   docker/try.sh [FLAG...]   FLAGs are added to the build, such as --build-arg PYTHON_IMAGE=…
#
#   ENGINE    docker; or podman
#   COMPOSE   $ENGINE compose; or podman-compose
set -euo pipefail

engine=${ENGINE:-docker}
read -ra compose <<<"${COMPOSE:-$engine compose}"
command -v "$engine" >/dev/null || { echo "try.sh: there is no $engine: set ENGINE" >&2; exit 2; }
compose+=(--project-name ortlaunch-try --file docker/compose.yaml)

"$engine" build --file docker/Dockerfile.cpu --tag ortlaunch:cpu "$@" .
"$engine" run --rm --shm-size=1g ortlaunch:cpu doctor
"$engine" run --rm --shm-size=1g ortlaunch:cpu model=gpt2_nano train.steps=5

docker/secrets.sh
trap '"${compose[@]}" down --volumes' EXIT
"${compose[@]}" up --detach mlflow
"${compose[@]}" run --rm train model=gpt2_nano train.steps=20
"${compose[@]}" run --rm train compare
