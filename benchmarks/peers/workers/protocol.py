"""Jobs and results of workers: JSON objects, with the standard library only.

A job has the fields of `Job`; its two tasks are "prepare" (write the model in the engine's own
format; `model` is the Hugging Face folder and `prepared` the new folder) and "run". The last line
of a worker's output is the result: for "prepare" an empty object, for "run" the fields of `Result`.
"""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NotRequired, TypedDict


class Job(TypedDict):
    """Work of one worker process.

    Attributes:
        task: "prepare" or "run".
        model: folder of the model in Hugging Face format.
        prepared: folder of the model in the engine's own format.
        dtype: dtype of weights and arithmetic if the engine lets the user choose: bfloat16 or
            float32.
        threads: CPU threads.
        prompts: token ids of each prompt.
        new_tokens: number of output tokens of each prompt.
        warmup_prompts: prompts that run before the clock starts, with `warmup_tokens` outputs each.
        warmup_tokens: number of output tokens of each warm-up prompt.
        kv_bytes: size of the KV memory.
        kv_bytes_per_token: KV bytes of a token at 2 bytes per element.
        max_num_batched_tokens: token budget of a step, for engines with such an option.
        options: options of this engine.
    """

    task: str
    model: str
    prepared: str
    dtype: str
    threads: int
    prompts: list[list[int]]
    new_tokens: list[int]
    warmup_prompts: list[list[int]]
    warmup_tokens: int
    kv_bytes: int
    kv_bytes_per_token: int
    max_num_batched_tokens: int
    options: dict[str, Any]


class Result(TypedDict):
    """Measurements of one run.

    Attributes:
        version: version of the engine.
        weights_type, kv_type: element types, as the engine holds them.
        weight_bytes: bytes of the weights, as the engine holds them.
        kv_bytes: bytes of the KV memory; for an engine without a fixed one, the peak.
        load_s: time to load and warm up.
        total_s: time from the first prompt to the last token.
        times_s: time of each output token of each prompt, from the start.
        tokens: output tokens of each prompt.
        peak_rss_bytes: peak resident memory of the process.
        figures: further numbers of the engine.
    """

    version: str
    weights_type: str
    weight_bytes: int
    kv_type: str
    kv_bytes: int
    load_s: float
    total_s: float
    times_s: list[list[float]]
    tokens: list[list[int]]
    peak_rss_bytes: int
    figures: NotRequired[dict[str, Any]]


class Outputs:
    """Output tokens of each prompt with their times; the clock starts when the object is made.

    Args:
        prompts: number of prompts.
    """

    def __init__(self, prompts: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(prompts)]
        self.times_s: list[list[float]] = [[] for _ in range(prompts)]
        self._started_s = time.perf_counter()

    def elapsed_s(self) -> float:
        """Time since the start."""
        return time.perf_counter() - self._started_s

    def add(self, prompt: int, token_ids: list[int], time_s: float | None = None) -> None:
        """Record tokens of one prompt.

        Args:
            prompt: index of the prompt.
            token_ids: the tokens.
            time_s: time of the tokens from the start; None: now.
        """
        self.tokens[prompt] += token_ids
        now_s = self.elapsed_s() if time_s is None else time_s
        self.times_s[prompt] += [now_s] * len(token_ids)


def serve(prepare: Callable[[Job], None] | None, run: Callable[[Job], Result]) -> None:
    """Execute the job in the file that the command line names, or on standard input.

    Args:
        prepare: writes the model in the engine's own format; None: the engine reads the folder in
            Hugging Face format.
        run: runs the prompts.
    """
    text = Path(sys.argv[1]).read_text(encoding="utf-8") if sys.argv[1:] else sys.stdin.read()
    job: Job = json.loads(text)
    found: Mapping[str, object] = {}
    if job["task"] == "run":
        found = run(job)
    elif prepare is not None:
        prepare(job)
    print(json.dumps(found), flush=True)


def peak_rss_bytes() -> int:
    """Peak resident memory of this process.

    `getrusage` is not used: its peak includes the parent process before the program was started.
    """
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no line VmHWM")


def file_bytes(folder: str, pattern: str) -> int:
    """Total size of the files of a folder that match a pattern."""
    return sum(path.stat().st_size for path in Path(folder).glob(pattern))
