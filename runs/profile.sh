#!/usr/bin/env bash
# Measures the read, copy and compute rates of this machine and stores them in the user's cache.
# `python -m benchmarks throughput` does not need them: it measures its own. Last line: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m quire profile --json "$@"
