#!/usr/bin/env bash
# Disk size of `pip install "quire-llm[serve]"` in a new virtual environment, with the CPU build of PyTorch
# (`runs/install.sh cpu`) or the build that pip chooses, which has CUDA on Linux (`runs/install.sh cuda`).
# Folder: INSTALL_OUT, or out/install. Last line of output: one JSON object.
set -euo pipefail
cd "$(dirname "$0")/.."
build="${1:-cpu}"
folder="${INSTALL_OUT:-out/install}/$build"
index=(--extra-index-url https://download.pytorch.org/whl/cpu)
[ "$build" = cpu ] || index=()
rm -rf "$folder"
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet "${index[@]}" ".[serve]"
"$folder/bin/python" - "$folder" "$build" <<'PY'
import json
import subprocess
import sys
from importlib.metadata import version

folder, build = sys.argv[1:]
used = subprocess.run(["du", "-s", "-B1", folder], capture_output=True, text=True, check=True)
size = {f"{build}_bytes": int(used.stdout.split()[0])}
versions = {name: version(name) for name in ("torch", "transformers")}
print(json.dumps({"name": "install", "claims": size, "versions": versions}))
PY
