#!/bin/sh
# Installs the wheels of the bundle beside them, without a network, and starts the proof: prove.sh --device cuda|cpu
set -eu
ORTLAUNCH_PROOF_BEGAN=$(date +%s)
root=$(cd "$(dirname "$0")/../.." && pwd)
python=${PYTHON:-python3}
site=$root/gpu-site
if [ -d "$root/gpu-wheels" ] && [ ! -f "$site/.complete" ]; then
    "$python" -m pip install --quiet --disable-pip-version-check --no-index --no-deps --no-compile --no-cache-dir \
        --upgrade --target "$site" "$root"/gpu-wheels/*.whl
    touch "$site/.complete"
fi
PYTHONPATH=$root:$site${PYTHONPATH:+:$PYTHONPATH}
export PYTHONPATH ORTLAUNCH_PROOF_BEGAN
exec "$python" -m tests.gpu.prove "$@"
