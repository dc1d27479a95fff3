#!/usr/bin/env bash
# Claims: choosing representatives (signatures, distances, buckets, selection) takes at most 0.5 % of a
# run (125M, 16 prompts of 1,024, cap 672, 64 at a time, 512 new tokens), k-means beside it; gains of
# KVCrush and of OpenVINO's form over their base rules at equal budgets, with intervals; right answers
# over full KV's at 4 x compression; KL, top-1 and ROUGE-L on real text; signature bytes. With
# --out FOLDER a run that was stopped goes on. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/quire bench kvcrush --json "$@"
