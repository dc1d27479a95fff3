#!/usr/bin/env bash
# Disk size of `pip install "quire-llm[serve]"` in a new virtual environment, with the CPU build of PyTorch
# (`runs/install.sh cpu`) or the build that pip chooses, which has CUDA on Linux (`runs/install.sh cuda`).
# Folder: INSTALL_OUT, or out/install. Index of the CPU builds: INSTALL_INDEX, or that of PyTorch; where the
# default index of pip has them, set it to "". Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
build="${1:-cpu}"
folder="${INSTALL_OUT:-out/install}/$build"
cpu_index="${INSTALL_INDEX-https://download.pytorch.org/whl/cpu}"
index=()
if [ "$build" = cpu ] && [ -n "$cpu_index" ]; then index=(--extra-index-url "$cpu_index"); fi
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet "${index[@]}" ".[serve]"
"$folder/bin/python" - "$folder" "$build" <<'PY'
import json
import subprocess
import sys

from quire.cli.report import envelope

folder, build = sys.argv[1:]
used = subprocess.run(["du", "-s", "-B1", folder], capture_output=True, text=True, check=True)
head = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
claims = {f"{build}_bytes": int(used.stdout.split()[0])}
config = {"build": build, "extras": ["serve"], "repeats": 1}
print(json.dumps(envelope("install", claims, {}, config) | {"commit": head.stdout.strip() or None}))
PY
