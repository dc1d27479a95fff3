#!/usr/bin/env bash
# Claims: on BATON's workloads with scaled lengths, vector embedding (baton_pd) reaches at least 0.9 of
# ideal first-come list scheduling at the run's own measured costs, w1 at 4 and 8 rows, w2 at 2 to 10;
# beside it its speed over static batches, over vector shaping, and that of continuous batching over
# pages; no idle rows while others wait; peak KV bytes over static's. Then the Azure conversation trace
# with urgent requests in too small a KV memory. `--parts` runs some only. Last line of output: one JSON
# object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks rebatch --json "$@"
