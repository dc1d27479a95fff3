#!/usr/bin/env bash
# Table of docs/weights.md: peak of activations and transferred weights of a step of 4,096 tokens with
# offloaded layers, as one batch and as eight batches layer by layer. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks.guides.layer_batches "$@"
