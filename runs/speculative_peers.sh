#!/usr/bin/env bash
# Gain of prompt lookup of one user in Quire, OpenVINO GenAI and llama.cpp, on the same prompts of SmolLM2-135M-Instruct.
# Needs `make peers`. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks.guides.speculative_peers smollm2 "$@"
