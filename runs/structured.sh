#!/usr/bin/env bash
# Claim: 8 requests with a JSON schema beside 8 plain requests of quire-tiny make a step about 7 % longer;
# an ambiguous grammar delays steps by a bounded time. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
exec .venv/bin/python -m benchmarks.structured "$@"
