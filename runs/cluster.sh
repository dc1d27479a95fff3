#!/usr/bin/env bash
# Figures of docs/scale.md, simulated: prefix hit rate and time to first token of each router beside one
# machine with the memory and rates of all replicas; late load reports, missing KV events, a tenant that
# floods, up to 256 replicas. `--parts` selects parts. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks cluster --json "$@"
