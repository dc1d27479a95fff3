#!/usr/bin/env bash
# Measures the cost of KV offload on a machine with a GPU and compares it with data-sheet arithmetic:
#   runs/device.sh --parts link,products,together       M1-M3   copies, products, both concurrently
#   runs/device.sh --parts step,sweep,codes             M4-M6   a decode step, every split, quantized KV on the link
#   runs/device.sh --parts swap,host,refit,accuracy     M7-M10  swap, CPU attention, a busy link, errors
# Each command should take less than ten minutes on one H200 with 16 cores; `--pinned` sets the pinned host memory
# (24 GiB). `--quick` is a short trial on any machine. Claims: slowdown_* (expected under 0.03), OPT-13B_lB_ms
# (488), sweep_lB_over_least (at most 1.05), host_gain (2 to 3.5), refit_steps (at most 10), refit_loss (under 0.05),
# accuracy_remade (at most 4e-3). Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks device --json "$@"
