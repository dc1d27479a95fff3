#!/usr/bin/env bash
# Ten presses of kvpress and the rules of Quire of the same methods on SmolLM2, in float32, with the first 15
# prompts of five tasks of runs/board.sh, at 50 %. kvpress runs in the environment of QUIRE_KVPRESS_PYTHON:
#     python3 -m venv build/kvpress && build/kvpress/bin/pip install torch==2.13.0 && build/kvpress/bin/pip install kvpress==0.5.5 gguf
#     QUIRE_KVPRESS_PYTHON=build/kvpress/bin/python bash runs/kvpress.sh
# The same command goes on after an interruption; finished results are stored in docs/results/kvpress-cells.tar.xz. Last line of output: one JSON object. Folder: KVPRESS_OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${QUIRE_KVPRESS_PYTHON:?expected the Python of an environment with kvpress; the comment of this script builds one}"
out="${KVPRESS_OUT:-out/kvpress}" results=docs/results/kvpress-cells.tar.xz status=0
mkdir -p "$out"
[ ! -f "$results" ] || tar -xJf "$results" -C "$out" --skip-old-files
.venv/bin/python -m benchmarks kvpress smollm2 --kv-memory 3GiB --max-num-seqs 32 --dtype float32 --budgets 50% --num-prompts 15 \
    --python "$QUIRE_KVPRESS_PYTHON" --out "$out" --json "$@" || status=$?
[ ! -d "$out/cells" ] || tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cJf "$results" -C "$out" cells
exit $status
