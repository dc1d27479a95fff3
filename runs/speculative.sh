#!/usr/bin/env bash
# Output tokens/s of SmolLM2-135M-Instruct with proposed tokens over those without: rewriting, code and prose of one user,
# prose of 16 users; outputs of 100 prompts in float32 are compared. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks.guides.speculative smollm2 --equal 100 "$@"
