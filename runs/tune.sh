#!/usr/bin/env bash
# Claim: `quire tune` on quire-tiny with 200 prompts finds a configuration with at least twice the
# concurrent requests whose top-1 agreement on held-out prompts is 0.97 or more; under 15 minutes on 2
# cores. A second run in the same folder reads the stored scores and has the same result. Last line
# of output: one JSON object. Folder of the result: TUNE_OUT, or out/tune.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${TUNE_OUT:-out/tune}"
mkdir -p "$out"
.venv/bin/python - "$out/prompts.jsonl" <<'PY'
"""Writes 200 prompts of 320 tokens: 40 of each of five tasks, with their answers."""

import json
import sys

from quire.evals.questions import make_questions
from quire.models.loader import load_model
from quire.models.tokenizer import encode_prompt

tokenizer = load_model("quire-tiny").tokenizer
with open(sys.argv[1], "w", encoding="utf-8") as lines:
    for task in ("lines", "kv", "niah", "facts", "labels"):
        found = make_questions(
            task, 320, 40, measure=lambda text: len(encode_prompt(tokenizer, text))
        )
        for one in found:
            lines.write(json.dumps({"prompt": one.prompt, "answer": one.answer}) + "\n")
PY
exec .venv/bin/python -m quire tune quire-tiny --data "$out/prompts.jsonl" --kv-memory 16MiB --min-quality 0.97 \
    --max-tokens 32 --out "$out" --json "$@"
