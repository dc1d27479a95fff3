#!/usr/bin/env bash
# Sparse attention on SmolLM2-135M-Instruct: quality at 2,048, 4,096 and 7,936 tokens with 10 % of the pages read, over
# full KV on the same 203 prompts (29 of each of seven tasks), computed in bfloat16. The question is computed in decode
# steps, which read few pages. The same command continues after an interruption. SPARSE_TOKENS: the lengths. Folder:
# SPARSE_OUT. Last line of output: one JSON object for the last length.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${SPARSE_OUT:-out/sparse}"
for tokens in ${SPARSE_TOKENS:-2048 4096 7936}; do
    .venv/bin/python -m quire board smollm2 --kv-memory 6GiB --max-num-seqs 16 --rules "" --codecs none \
        --sparse "off;quest:budget=10%" --tokens "$tokens" --num-prompts 29 --no-sanity-check --out "$out/$tokens" --json "$@"
done
