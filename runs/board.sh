#!/usr/bin/env bash
# Leaderboard of quire-tiny in docs/board-measured.md: 12 rules, 3 budgets, 2 schedules, 3 codecs. The same
# command goes on after an interruption. Last line of output: one JSON object. Folder: BOARD_OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m quire board quire-tiny --kv-memory 8MiB --dtype float32 --num-prompts 5 --out "${BOARD_OUT:-out/board}" \
    --json "$@"
