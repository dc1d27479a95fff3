#!/usr/bin/env bash
# Claims: int8 and int4 weights of quire-tiny raise the KL by less than 0.005 and 0.1 and change the mean
# of the tasks by less than 0.02 and 0.05; they take at most 1 / 1.9 and 1 / 3.3 of the bytes; a decode step
# of a 125M shape is at least 1.7 and 2.5 times as fast. `--parts` selects parts; with --out FOLDER a stopped
# run continues. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks weights --json "$@"
