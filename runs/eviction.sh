#!/usr/bin/env bash
# Claims: eviction (scoring and compaction, cap 1,024, 64 tokens at a time, 32 rows) takes under 3 % of a
# decode step; `when=pressure` costs under 1 % while memory is ample. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks eviction --json "$@"
