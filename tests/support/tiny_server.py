import sys

import torch

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.engine.core import Engine
from quire.errors import EngineDead
from quire.serve.app import run_server
from quire.serve.config import ServerConfig
from quire.serve.connection import bind

STEPS_BEFORE_DEATH = 20


def run_tiny_server(options: dict[str, object]) -> None:
    """Serve at a free port, which is printed.

    Args:
        options: of `ServerConfig`; memory: KV memory; dies: whether a step fails after some time.
    """
    dies, memory = options.pop("dies", False), options.pop("memory", "4MiB")
    torch.set_num_threads(1)
    llm = LLM("quire-tiny", dtype="float32", kv=KVConfig(memory=memory), verify=False)
    if dies:
        _let_die(llm.engine)
    try:
        run_server(llm, bind("127.0.0.1", 0), ServerConfig(**options))
    except EngineDead as error:
        print(error, file=sys.stderr)
        sys.exit(2)


def _let_die(engine: Engine) -> None:
    step, num_steps = engine.step, 0

    def failing() -> object:
        nonlocal num_steps
        num_steps += 1
        if num_steps > STEPS_BEFORE_DEATH:
            raise RuntimeError("a broken kernel")
        return step()

    engine.step = failing
