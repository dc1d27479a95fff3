#!/usr/bin/env bash
# Table of docs/guides/evaluate.md: scores of quire-tiny on five tasks with full KV and with h2o at 25 %,
# their differences with intervals, and the KV bytes of a request. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m quire eval run quire-tiny --tasks lines,kv,niah,labels,perplexity --tokens 512 \
    --num-prompts 25 --dtype float32 --kv-memory 64MiB --evict h2o:cap=25%,recent=16 --json "$@"
