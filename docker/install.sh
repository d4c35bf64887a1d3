#!/usr/bin/env bash
# Installs ortlaunch into a new virtual environment and compiles what ONNX Runtime needs for it, so that nothing has to be
# compiled where it runs. The images are made by this, and the tests run it.
#
#   docker/install.sh EXTRAS FOLDER SOURCE
#     EXTRAS   of ortlaunch, separated by commas: cpu,digits or cuda,digits
#     FOLDER   the virtual environment, which must not exist; what a failure leaves of it is removed
#     SOURCE   a wheel of ortlaunch, or the folder of its sources
#
#   PYTHON            the Python 3.11 to use; python3.11
#   CONSTRAINTS       the tested versions; constraints.txt of this checkout
#   TORCH_INDEX       package index that torch comes from, such as https://download.pytorch.org/whl/cpu; pip's own
#   ORTLAUNCH_CACHE   where the compiled libraries go; FOLDER/cache
#   ORTLAUNCH_MARCH   processor to compile for; x86-64-v3, which every x86 server of the last ten years is
set -euo pipefail

fail() {
    echo "install.sh: $*" >&2
    exit 2
}

[ $# -eq 3 ] || fail "needs EXTRAS FOLDER SOURCE, such as: install.sh cpu,digits /opt/ortlaunch ."
extras=$1 folder=$2 source=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3.11}
constraints=${CONSTRAINTS:-$here/constraints.txt}
[ ! -e "$folder" ] || fail "$folder exists already"
[ -e "$source" ] || fail "$source: there is no such wheel or folder"
[ -r "$constraints" ] || fail "CONSTRAINTS=$constraints: cannot be read"
command -v "$python" >/dev/null || fail "there is no $python: give another as PYTHON=…"
command -v "${CXX:-c++}" >/dev/null || fail "there is no C++ compiler: Debian's package is g++, Red Hat's gcc-c++"
source=$(realpath "$source") folder=$(realpath --canonicalize-missing --no-symlinks "$folder")

trap '[ $? -eq 0 ] || rm -rf "$folder"' EXIT
"$python" -m venv "$folder"
pip() { "$folder/bin/python" -m pip --quiet --disable-pip-version-check --no-cache-dir "$@"; }
# torch first: what comes after it then finds this build and brings no other. It comes alone: an index of torch's builds
# has few versions of the packages that it needs, and seldom the tested ones.
pip install --constraint "$constraints" --no-deps ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} torch
# As a path, which may have spaces in it, where an address may not.
pip install --constraint "$constraints" "${source}[$extras]"
pip check

export ORTLAUNCH_CACHE="${ORTLAUNCH_CACHE:-$folder/cache}" ORTLAUNCH_MARCH="${ORTLAUNCH_MARCH:-x86-64-v3}"
mkdir -p "$ORTLAUNCH_CACHE"
# -P: the installed package, where this is started in a checkout.
"$folder/bin/python" -P -m ortlaunch.ort.extension
# Any user may be the one who runs: exported graphs are added here, and nobody removes another's.
chmod 1777 "$ORTLAUNCH_CACHE"
"$folder/bin/ortlaunch" --version
