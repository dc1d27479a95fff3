"""Run a file of requests in the format of OpenAI's Batch API with `quire batch`.

An interrupted run can be started again: lines that have a record are skipped.

    python examples/offline_batch.py [FOLDER]
"""

import json
import subprocess
import sys
from pathlib import Path


def write_requests(path: Path) -> None:
    bodies = [{"prompt": f"Chapter {n}.", "max_tokens": 16, "temperature": 0} for n in range(1, 9)]
    lines = (
        {"custom_id": f"chapter-{n}", "method": "POST", "url": "/v1/completions", "body": body}
        for n, body in enumerate(bodies, 1)
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def run(requests: Path, results: Path) -> None:
    command = [sys.executable, "-m", "quire", "batch", "quire-tiny", str(requests), str(results)]
    subprocess.run([*command, "--kv-memory", "32MiB"], check=True)


def main() -> None:
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else ".")
    requests, results = folder / "requests.jsonl", folder / "results.jsonl"
    write_requests(requests)
    run(requests, results)
    run(requests, results)  # all lines have records: nothing is computed twice
    for line in results.read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        print(record["custom_id"], repr(record["response"]["body"]["choices"][0]["text"]))


if __name__ == "__main__":
    main()
