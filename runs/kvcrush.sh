#!/usr/bin/env bash
# Claims: selecting representatives (signatures, distances, buckets, selection) takes at most 0.5 % of a
# run (125M, 16 prompts of 1,024, cap 672, 64 tokens at a time, 512 output tokens), compared with k-means;
# gains of KVCrush and of OpenVINO's form at equal budgets, with intervals, over their base rules with one
# retained set per head and with one per layer; accuracy over that of full KV at 4 x compression; KL, top-1
# and ROUGE-L on real text, also at a budget of 2,048. `--parts` selects parts; with --out FOLDER a
# stopped run continues. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks kvcrush --json "$@"
