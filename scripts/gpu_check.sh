#!/usr/bin/env bash
# Runs everything that needs one GPU, in under three minutes; results as JSON. Nothing of it has run on a GPU.
#   gpu_check.sh [FILE]       default: build/gpu_check.json
# Exits with 1 if a check failed, and with 2 where there is no GPU. PYTHON chooses the interpreter; it needs torch and triton. Where it cannot
# import shardopt, the host kernel is built by what is there (cmake, g++, nanobind), without any network.
set -euo pipefail

cd "$(dirname "$0")/.."
out=$(realpath -m "${1:-build/gpu_check.json}")
python=${PYTHON:-}
[ -n "$python" ] || { [ -x .venv/bin/python ] && python=.venv/bin/python || python=python3; }

if ! "$python" -c 'import torch, sys; sys.exit(not torch.cuda.is_available())' 2>/dev/null; then
    echo "gpu_check: $python finds no torch with a CUDA device, so nothing was checked."
    exit 2
fi

if ! "$python" -c 'import shardopt._host' 2>/dev/null; then
    build=build/gpu_check
    mkdir -p "$build"
    echo "gpu_check: building the host kernel in $build (log in $build/log)"
    if ! { cmake -S . -B "$build/cmake" -DCMAKE_BUILD_TYPE=Release -DPython_EXECUTABLE="$(command -v "$python")" \
        -Dnanobind_DIR="$("$python" -m nanobind --cmake_dir)" && cmake --build "$build/cmake" --parallel &&
        rm -rf "$build/site" && cmake --install "$build/cmake" --prefix "$build/site"; } >"$build/log" 2>&1; then
        cat "$build/log" >&2
        exit 1
    fi
    cp -r src/shardopt/. "$build/site/shardopt/"
    export PYTHONPATH="$PWD/$build/site${PYTHONPATH:+:$PYTHONPATH}"
fi

exec timeout 180 "$python" -m tests.gpu --out "$out"
