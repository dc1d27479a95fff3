#!/usr/bin/env bash
# Claims: a decode step with KV in host memory, on threads with a throttled link at the ratios of OPT-13B
# on an A100 (rho 0.58, xi 0.5): gain of the pipelined split over prefetching (at least 1.46; formula 1.86),
# latency reduction of the paper's split (at least 0.28; formula 0.316), gain of the pipelined over the
# paper's split (at least 1.1), device busy (at least 0.95), error of predictions (p95 at most 0.15), staging
# over prefetching (at most 1.05); never slower in a sweep of rho and xi; CPU attention if recompute does
# not pay; steps until the split follows a halved link rate (at most 10); prefix loads from disk and over
# 10 Gb compared with loading all; whole models on a virtual clock. `--parts` selects parts. Last line of
# output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks offload --json "$@"
