#!/usr/bin/env bash
# Claims: selecting representatives (signatures, distances, buckets, selection) takes at most 0.5 % of a
# run (125M, 16 prompts of 1,024, cap 672, 64 tokens at a time, 512 output tokens), compared with k-means.
# Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks kvcrush --json "$@"
