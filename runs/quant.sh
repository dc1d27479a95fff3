#!/usr/bin/env bash
# Claims: decode attention in C over int8 and int4 pages against bfloat16 pages at 32 x 4,096 tokens, 32
# heads over 8 KV heads of 128 (at least 1.5 and 2 times as fast), int8's bytes a second over the read
# ceiling (at least 0.6), beside 2,048 and 8,192 tokens; tokens in the same bytes (int8 1.88, int4 3.4,
# with outliers 3), net of pages and with kept tokens; tokens a second at the largest batch in one KV
# memory; KL, top-1, perplexity and tasks by codec; keys per channel against per token, bits of keys
# against bits of values, outliers. `--parts` runs some only; with --out FOLDER a run that was stopped
# goes on. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks quant --json "$@"
