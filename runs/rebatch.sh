#!/usr/bin/env bash
# Claims: on BATON's workloads with scaled lengths, vector embedding (baton_pd) reaches at least 0.9 of
# ideal first-come list scheduling at the run's own measured costs, w1 at 4 and 8 rows, w2 at 2 to 10;
# its speed over static batches and over vector shaping, and that of continuous batching over pages; no
# idle rows while requests wait; peak KV bytes over those of static batches. Then the Azure conversation
# trace with urgent requests and too small a KV memory. `--parts` selects parts. Last line of output: one
# JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks rebatch --json "$@"
