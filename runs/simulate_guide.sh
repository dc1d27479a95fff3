#!/usr/bin/env bash
# Output of `quire simulate` in docs/guides/researchers.md: memory use of the page's trace with full KV and
# with the page's rule. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD/src:$PWD" exec .venv/bin/python -m benchmarks.guides.simulate "$@"
