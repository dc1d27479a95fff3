#!/usr/bin/env bash
# Output tokens/s of SmolLM2-135M-Instruct in 108 MiB of KV memory, over full KV's, with the best entries of each class of
# KV bytes of docs/results/board.json: a column of docs/board-measured.md. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks.guides.fixed_memory docs/results/board.json "$@"
