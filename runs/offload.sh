#!/usr/bin/env bash
# Claims: decode steps of an engine with KV in host memory on a link slowed to the ratios of OPT-13B on an A100
# (rho 0.58, xi 0.5): gain of the split over a transfer of all KV (at least 1.3), with weights on the device and
# offloaded; prefix loads from disk and over 10 Gb compared with loading all.
# `--parts` selects parts. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks offload --json "$@"
