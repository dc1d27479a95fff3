#!/usr/bin/env bash
# Claims: on 2 cores with the same work, model and number of threads, the total time of a Llama of
# 125M parameters is at most 0.85 of that of the best other CPU engine, and one user and eight users
# decode at least as fast. In a quarter of the KV memory: at least as fast as OpenVINO GenAI, 1.5
# times as fast if both evict, and 2.5 times as fast as vLLM. Needs `make peers`. Takes hours; an
# interrupted run continues with the same --out. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks peers --json --out out/peers "$@"
