#!/usr/bin/env bash
# Makes or refreshes a virtual environment with shardopt in it (editable). Says one line; pip's own output appears only when it fails.
#   make_venv.sh FOLDER TORCH_VERSION EXTRAS
set -euo pipefail

folder=$1 torch=$2 extras=$3
log=$folder/pip.log

echo "making $folder: torch $torch, shardopt[$extras] (minutes the first time, log in $log)"
[ -x "$folder/bin/python" ] || "${PYTHON:-python3}" -m venv "$folder"
# Without byte-compiling everything torch brings, installing takes a quarter of the CPU time; imports compile what they use.
if ! "$folder/bin/python" -m pip install --disable-pip-version-check --no-compile "torch==$torch" -e ".[$extras]" >"$log" 2>&1; then
    cat "$log" >&2
    exit 1
fi
touch "$folder/.installed"
