#!/usr/bin/env bash
# Claims: in a KV memory in which contiguous lanes of 1,024 tokens hold 4 sequences, paged int4 with a
# prefix cache generates at least 3.38 times the tokens per second of contiguous lanes; also each step in
# between (pages, int8, prefix cache, int4). Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks stack --json "$@"
