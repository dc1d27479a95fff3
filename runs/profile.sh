#!/usr/bin/env bash
# Measures what this machine reads, copies and multiplies at most, and keeps it in the user's cache,
# which `python -m benchmarks throughput` does not need: it measures its own. Last line: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/quire profile --json "$@"
