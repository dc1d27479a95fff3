#!/usr/bin/env bash
# Table of docs/serving.md: time until large bodies are refused, latency of another tenant meanwhile,
# resident memory of the server afterwards, and the slowest response of /health while a body of 8 MiB is
# parsed. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks.guides.body_limits "$@"
