#!/usr/bin/env bash
# Claims: decode attention in C over int8 and int4 pages compared with bfloat16 pages at 32 x 4,096 tokens,
# 32 heads over 8 KV heads of 128 (at least 1.5 and 2 times as fast), also at 2,048 and 8,192 tokens; bytes
# per second of int8 over the read rate (at least 0.6); tokens in equal bytes (int8 1.88, int4 3.4, with
# outliers 3), with page tables and with the full-precision window; tokens per second at the largest batch
# in one KV memory. `--parts` selects parts. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks quant --json "$@"
