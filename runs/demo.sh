#!/usr/bin/env bash
# Claims: SmolLM2 answers 8 questions about four texts and holds a chat in 120 MiB of KV memory; outputs
# with full KV equal those of Transformers. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m quire demo --json "$@"
