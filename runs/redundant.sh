#!/usr/bin/env bash
# Which eviction rules keep 0.975 of full KV's quality at half and at a quarter of the tokens, on tasks whose
# answer has several sources in the prompt: 12 rules that evict during prefill and decode, 60 prompts of each of
# four tasks. Batch-Max is the rule average. The same command goes on after an interruption. Last line of
# output: one JSON object. Folder: REDUNDANT_OUT.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m quire board quire-tiny --kv-memory 8MiB --dtype float32 --tasks repeats,retold,majority,topics \
    --budgets 25%,50% --schedules prefill_and_decode --codecs none --num-prompts 15 --seeds 1,2,3,4 --out "${REDUNDANT_OUT:-out/redundant}" \
    --json "$@"
