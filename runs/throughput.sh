#!/usr/bin/env bash
# Claims: 32 prompts of 512 tokens with 64 output tokens take at most 0.7 of the time of Transformers'
# static batch and 0.2 of its continuous batching; a decode step takes at most 2.5 times its lower bound;
# paged attention reaches at least 0.6 of the memory's read rate, and its statistics cost at most 0.15.
# Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks throughput --json "$@"
