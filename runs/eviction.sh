#!/usr/bin/env bash
# Claims: eviction (scoring and compaction, cap 1,024, 64 at a time, 32 rows) takes under 3 % of a
# decode step; being ready to evict under pressure costs under 1 % where memory is ample. Rules beside
# each other: right answers with intervals, perplexity, kept positions. With --out FOLDER a run that
# was stopped goes on. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks eviction --json "$@"
