#!/usr/bin/env bash
# Claims: 56 prompts run in 8 MiB of KV memory, eleven of them at once with full KV; pages in use beside
# memory that is reserved in advance; outputs with full KV equal those of Transformers. Counts and bytes
# are equal on every machine, times are not. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m quire demo --json "$@"
