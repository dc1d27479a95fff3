#!/usr/bin/env bash
# Claims: pages of 16 tokens waste at most 0.02 of the allocated KV memory on the Azure conversation
# trace; four beams of 2,048 tokens with different last 50 tokens hold at most 1.10 times one sequence; 64
# requests with one system prompt prefill at most 0.05 of the tokens they could share; the allocator takes
# under 0.02 of a decode step at 256 sequences. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks memory --json "$@"
