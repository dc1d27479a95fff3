#!/usr/bin/env bash
# Measures attention, decode steps, prefill, eviction, offload and batching on one GPU, with its own limits measured
# in the same run. One command, meant to take less than ten minutes on one GPU with 80 GB; `--parts` selects parts,
# and `--quick` is a short trial on any machine, without claims. Claims: equal_outputs (expected 1),
# attention_copy_share (at least 0.75), step_over_floor (at most 1.3), prefill_share (at least 0.6), and the ratios
# of batch_max, offload and rebatch. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks gpu --json "$@"
