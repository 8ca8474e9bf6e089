#!/usr/bin/env bash
# Two environments write the frozen checkpoint's optimizer each and read the other's: state has to be the same bits.
#   cross_torch.sh PYTHON PYTHON
set -euo pipefail
cd "$(dirname "$0")/.."
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
export OMP_NUM_THREADS=1

for python in "$1" "$2"; do
    version=$("$python" -c 'import torch; print(torch.__version__)')
    "$python" scripts/make_golden.py "$folder/$version"
    for reader in "$1" "$2"; do
        GOLDEN_FOLDER=$folder/$version "$reader" -m pytest -q --no-header -p no:cacheprovider tests/golden/test_format1.py \
            -k "loads_on_any or loads_without" >"$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
        echo "written by torch $version, read by $("$reader" -c 'import torch; print(torch.__version__)'): $(tail -1 "$folder/log")"
    done
done
