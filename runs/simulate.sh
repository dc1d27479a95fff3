#!/usr/bin/env bash
# Output of `quire simulate` in docs/simulate.md: the Azure conversation trace, which the package contains,
# in 16 GiB of KV memory. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m quire simulate --trace src/quire/assets/azure_conversation.csv.gz --kv-memory 16GiB \
    --no-enable-prefix-caching --machine a100 --json "$@"
