#!/usr/bin/env bash
# Tables of docs/guides/lm-eval.md: results of lm-evaluation-harness on quire-tiny with the class `quire`,
# with `quire serve` and with Transformers, and with the guide's eviction rule. LM_EVAL_PYTHON: a Python
# with lm_eval[api] and Accelerate. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHONPATH="$PWD/src:$PWD" exec "${LM_EVAL_PYTHON:-.venv/bin/python}" -m benchmarks.guides.lm_eval "$@"
