"""Runs `quire` command lines, each in its own forked process; torch is loaded only once.

Reads a JSON list of arguments from each line of standard input; writes the process id, and its wait
status when the process has ended.
"""

import json
import os
import sys

import torch

from quire.cli import batch_run
from quire.cli.main import run

GROUP_RECORDS = 4  # written often, so that kills occur at many states of the file


def main() -> None:
    torch.set_num_threads(1)
    batch_run.GROUP_RECORDS = GROUP_RECORDS
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            become_quire(json.loads(line))
        write(child)
        write(os.waitpid(child, 0)[1])


def write(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def become_quire(arguments: list[str]) -> None:
    sys.argv = ["quire", *arguments]
    os.dup2(2, 1)  # standard output is reserved for messages to the test
    status = 99
    try:
        run()
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 98
    finally:
        os._exit(status)  # never return to the loop of the parent


if __name__ == "__main__":
    main()
