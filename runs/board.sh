#!/usr/bin/env bash
# Leaderboard of SmolLM2-135M-Instruct in docs/board-measured.md: the grids of runs/board.toml on seven tasks of
# 30 prompts each, then the best four entries of each class of KV bytes with 500 prompts, and with fewer prompts of two
# more lengths. The same command continues after an interruption, also after --time-limit SECONDS. Last line of output: one JSON object. Folder: BOARD_OUT.
# Finished results are taken from docs/results/board-cells.tar.xz and packed there again; without that file all are measured.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${BOARD_OUT:-out/board}" results=docs/results/board-cells.tar.xz status=0
mkdir -p "$out"
[ ! -f "$results" ] || tar -xJf "$results" -C "$out" --skip-old-files
.venv/bin/python -m quire board smollm2 --kv-memory 3GiB --max-num-seqs 32 --grids runs/board.toml --confirm 4 \
    --confirm-tokens 1024,2048,4096 --confirm-prompts 500,120,60 --out "$out" --json "$@" || status=$?
folders=$(cd "$out" && ls -d cells confirm-*/cells 2> /dev/null) || true
[ -z "$folders" ] || tar --sort=name --mtime=@0 --owner=0 --group=0 --numeric-owner -cJf "$results" -C "$out" $folders
exit $status
