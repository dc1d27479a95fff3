#!/usr/bin/env bash
# Claims of docs/roofline.md: seconds of decode steps and prefills by operation, over the lower bounds from
# this machine's read and product rates. Options select the model and the codecs. Last line of output:
# one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks roofline --json "$@"
