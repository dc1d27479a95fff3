#!/usr/bin/env bash
# Table of docs/determinism.md: tokens per second with --batch-invariant over those without it, for
# 1, 8 and 32 sequences. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks invariant --threads 1 --repeats 5 --json "$@"
