#!/usr/bin/env bash
# Claims: choosing representatives (signatures, distances, buckets, selection) takes at most 0.5 % of a
# run (125M, 16 prompts of 1,024, cap 672, 64 at a time, 512 new tokens), k-means beside it; gains of
# KVCrush and of OpenVINO's form over their base rules at equal budgets, with intervals, over the rules
# as they are and over those with one kept set a layer; right answers over full KV's at 4 x compression;
# KL, top-1 and ROUGE-L on real text, also at a budget of 2,048; signature bytes. With `--data
# gsm8k=FILE --data xsum=FILE` also paged H2O against paged KVCrush on recorded prompts. `--parts` runs
# some only; with --out FOLDER a run that was stopped goes on. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks kvcrush --json "$@"
