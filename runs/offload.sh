#!/usr/bin/env bash
# Claims: a decode step whose KV is on the host, on threads with a throttled link at the ratios of OPT-13B
# on an A100 (rho 0.58, xi 0.5): the pipelined split over prefetching (at least 1.46; formula 1.86), the
# paper's split's cut in latency (at least 0.28; formula 0.316), the one over the other (at least 1.1), device
# busy (at least 0.95), predicted against measured (p95 at most 0.15), staging over prefetching (at most
# 1.05); never slower over a sweep of rho and xi; attention on the host where activations do not pay; steps
# until a halved link is followed (at most 10); a prefix from disk and 10 Gb over loading it all; whole
# models on a virtual clock. `--parts` runs some only. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks offload --json "$@"
