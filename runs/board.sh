#!/usr/bin/env bash
# Leaderboard of SmolLM2-135M-Instruct in docs/board-measured.md: the grids of runs/board.toml on seven tasks of
# 30 prompts each, then the best six entries of each class of KV bytes with 500 prompts, and with fewer prompts of two
# more lengths. The same command continues after an interruption, also after --time-limit SECONDS. Last line of output: one JSON object. Folder: BOARD_OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m quire board smollm2 --kv-memory 3GiB --max-num-seqs 32 --grids runs/board.toml --confirm 6 \
    --confirm-tokens 1024,2048,4096 --confirm-prompts 500,120,60 --out "${BOARD_OUT:-out/board}" --json "$@"
