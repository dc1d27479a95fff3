#!/usr/bin/env bash
# Claim: resident memory stays flat over 100,000 generated tokens, with arrivals, preemptions and
# cancellations, with and without eviction. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks soak --json "$@"
