"""A process that follows the protocol of kvpress's worker: `python press_stub.py PLAN`.

The plan is a JSON file: `outputs` has the token ids of full KV by the token ids of the prompt, and
`log` is a file that gets a line for each job. Names of presses set what happens:

    no press, KnormPress    full KV's output at a ratio of 0, above it the first token repeated
    MaskPress               the same, but its bytes are those of full KV
    WrongPress              a wrong output at every ratio
    RefusedPress            an error
    DiePress                the process ends
"""

import json
import sys
from pathlib import Path

BYTES_PER_TOKEN = 8192


def main(plan: dict) -> None:
    json.loads(sys.stdin.readline())
    print(json.dumps({"versions": {"kvpress": "0"}, "presses": ["KnormPress", "DMSPress"]}))
    sys.stdout.flush()
    for line in sys.stdin:
        job = json.loads(line)
        name = job["press"]["name"] if job["press"] else ""
        with Path(plan["log"]).open("a") as log:
            log.write(f"{name} {job['removed']} {job['schedule']} {len(job['requests'])}\n")
        print(json.dumps(answer(plan, name, job)))
        sys.stdout.flush()


def answer(plan: dict, name: str, job: dict) -> dict:
    if name == "DiePress":
        sys.exit("killed by the press")
    if name == "RefusedPress":
        return {"error": "AssertionError: too short"}
    outputs = []
    for request in job["requests"]:
        token_ids = plan["outputs"][str(request["token_ids"])]
        if job["removed"] or name == "WrongPress":
            token_ids = [token_ids[-1]] * len(token_ids)
        num_tokens, kept = len(request["token_ids"]), 1 - job["removed"]
        retained = num_tokens * (1.0 if name == "MaskPress" else kept)
        outputs.append(
            {
                "token_ids": token_ids,
                "peak_bytes": num_tokens * BYTES_PER_TOKEN,
                "retained_bytes": int(retained * BYTES_PER_TOKEN),
                "visible": kept,
            }
        )
    return {"outputs": outputs, "seconds": 1.0}


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
