#!/usr/bin/env bash
# Figures of docs/dashboard.md: time of the engine's thread for a page map of 256 requests and for the
# views of the first page, and bytes of the map. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks.guides.page_map "$@"
