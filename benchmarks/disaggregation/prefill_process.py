"""The process that computes prompts: reads them as JSON lines, stores their KV, and says so.

in    {"id": 3, "prompt": [5, 9, ...]}
out   {"id": 3, "token": 17}            its KV is in the store
"""

import json
import queue
import subprocess
import sys
import threading
from types import TracebackType
from typing import IO, Any

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import ConfigError

_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_END_S = 30.0


def main(model: str, remote: str, remote_memory: str, kv_memory: str) -> None:
    """Compute prompts until the input ends."""
    import torch

    torch.set_num_threads(1)
    stored = PrefixCacheConfig(remote=remote, remote_memory=remote_memory, write="through")
    kv = KVConfig(memory=kv_memory, prefix_cache=stored)
    llm = LLM(model, device="cpu", kv=kv, verify=False)
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        [output] = llm.generate(job["prompt"], _ONE_TOKEN)
        llm.flush_kv()
        print(json.dumps({"id": job["id"], "token": output.token_ids[0]}), flush=True)
    llm.close()


class Prefiller:
    """A running prefill process.

    Args:
        model: folder of the model.
        remote: URL of the store.
        remote_memory: size of the store.
        kv_memory: size of its KV memory.

    Attributes:
        done: ids of the prompts whose KV is in the store.

    Raises:
        ConfigError: the process ends before it is ready.
    """

    def __init__(self, model: str, remote: str, remote_memory: str, kv_memory: str) -> None:
        arguments = (model, remote, remote_memory, kv_memory)
        self.done: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.disaggregation.prefill_process", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        if not self._out.readline():
            self.close()
            raise ConfigError("the prefill process ended before it was ready; see its output")
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def _out(self) -> IO[Any]:
        assert self._process.stdout is not None, "stdout is a pipe"
        return self._process.stdout

    def _read(self) -> None:
        for line in self._out:
            self.done.put(json.loads(line)["id"])

    def send(self, number: int, prompt: list[int]) -> None:
        """Compute a prompt."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.write(json.dumps({"id": number, "prompt": prompt}) + "\n")
        self._process.stdin.flush()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None, "stdin is a pipe"
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._out.close()

    def __enter__(self) -> "Prefiller":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
