"""The process that runs kvpress, with a module that stands in for kvpress."""

import ast
import json
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache

from benchmarks.kvpress import worker as worker_module
from benchmarks.kvpress.worker import Presses, Worker, serve, stored_bytes
from support import zoo

PROMPT = list(range(3, 15))
PROMPT_LENGTH = len(PROMPT)


def cache_of(kwargs):
    """The cache of a layer's arguments, whose name depends on the version of Transformers."""
    return kwargs.get("past_key_values", kwargs.get("cache"))


class BasePress:
    """Keeps the last keys of each layer in the prefill."""

    def __init__(self, compression_ratio: float = 0.0) -> None:
        self.compression_ratio = compression_ratio

    def kept(self, length: int) -> int:
        return int(length * (1 - self.compression_ratio))

    def hook(self, module, inputs, kwargs, output):
        layer = cache_of(kwargs).layers[module.layer_idx]
        kept = self.kept(layer.keys.shape[2])
        layer.keys = layer.keys[:, :, -kept:].clone()
        layer.values = layer.values[:, :, -kept:].clone()
        return output

    @contextmanager
    def __call__(self, model):
        hooks = [
            layer.self_attn.register_forward_hook(self.hook, with_kwargs=True)
            for layer in model.model.layers
        ]
        yield
        for hook in hooks:
            hook.remove()


class ViewPress(BasePress):
    """The same, but holds the memory of all keys."""

    def hook(self, module, inputs, kwargs, output):
        layer = cache_of(kwargs).layers[module.layer_idx]
        kept = self.kept(layer.keys.shape[2])
        layer.keys, layer.values = layer.keys[:, :, -kept:], layer.values[:, :, -kept:]
        return output


class MaskPress(BasePress):
    """Marks keys in the way of kvpress, and removes none."""

    def hook(self, module, inputs, kwargs, output):
        masked = PROMPT_LENGTH - self.kept(PROMPT_LENGTH)
        module.masked_key_indices = (torch.zeros(masked), torch.zeros(masked), torch.zeros(masked))
        return output


class KeyRerotationPress(BasePress):
    compression_ratio = 0.0

    def __init__(self, press: BasePress) -> None:
        super().__init__()
        self.press = press


@dataclass
class DecodingPress(BasePress):
    """Keeps the last keys after every token."""

    base_press: BasePress
    compression_interval: int = 512
    target_size: int = 2048

    def kept(self, length: int) -> int:
        return min(self.target_size, length)


KVPRESS = SimpleNamespace(
    BasePress=BasePress,
    ViewPress=ViewPress,
    MaskPress=MaskPress,
    KeyRerotationPress=KeyRerotationPress,
    DecodingPress=DecodingPress,
    version="1",
)


def spec(name, **options):
    return {"name": name, "options": options}


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama").float().eval()


@pytest.fixture(scope="module")
def worker(model):
    texts = SimpleNamespace(decode=lambda ids, **options: " ".join(map(str, ids)))
    return Worker(Presses(KVPRESS), model, texts)


def job(
    press, removed=0.5, schedule="prefill_end", *, stop=(), eos=(), undecodable=(), max_tokens=4
):
    request = {"token_ids": PROMPT, "question_tokens": 0, "max_tokens": max_tokens}
    request["stop"] = list(stop)
    return {
        "press": press,
        "removed": removed,
        "schedule": schedule,
        "eos_token_ids": list(eos),
        "undecodable_ids": list(undecodable),
        "requests": [request],
    }


def output(worker, *arguments, **options):
    [found] = worker.run(job(*arguments, **options))["outputs"]
    return found


def token_bytes(model):
    """Bytes of a token in the cache of all layers."""
    cache = DynamicCache()
    model(torch.tensor([PROMPT]), past_key_values=cache)
    return stored_bytes(cache) // len(PROMPT)


def test_without_a_press_outputs_are_those_of_transformers(worker, model):
    expected = model.generate(
        torch.tensor([PROMPT]), do_sample=False, max_new_tokens=4, eos_token_id=None
    )

    found = output(worker, None, 0.0)

    assert found["token_ids"] == expected[0, len(PROMPT) :].tolist()
    assert found["visible"] == 1.0
    assert found["retained_bytes"] == token_bytes(model) * len(PROMPT)
    assert found["peak_bytes"] == token_bytes(model) * (len(PROMPT) + 3)


def test_press_that_frees_has_fewer_bytes_and_the_peak_of_one_whole_layer(worker, model):
    found = output(worker, spec("ViewPress"))
    freed = output(worker, spec("KeyRerotationPress", press=spec("ViewPress")), 0.5)

    all_bytes = token_bytes(model) * len(PROMPT)
    assert found["retained_bytes"] == all_bytes  # a view holds the memory of all keys
    assert found["visible"] == freed["visible"] == 0.5
    kept = token_bytes(model) * len(PROMPT) // 2
    layers = len(model.model.layers)
    base = SimpleNamespace(**vars(KVPRESS), KeepPress=type("KeepPress", (BasePress,), {}))
    found = output(Worker(Presses(base), model, None), spec("KeepPress"), max_tokens=1)
    assert found["retained_bytes"] == kept
    assert found["peak_bytes"] == kept + (all_bytes - kept) // layers


def test_masked_keys_are_not_visible_and_the_next_prompt_has_none(worker, model):
    found = output(worker, spec("MaskPress"))

    assert found["retained_bytes"] == token_bytes(model) * len(PROMPT)
    heads = model.config.num_key_value_heads
    assert found["visible"] == pytest.approx(1 - 0.5 / heads)
    assert output(worker, None, 0.0)["visible"] == 1.0


def test_tokens_after_the_prompt_follow_it_unless_keys_are_rerotated(worker, model):
    seen = []

    def position(module, arguments, kwargs):
        seen.append(kwargs["position_ids"].flatten().tolist())

    hook = model.register_forward_pre_hook(position, with_kwargs=True)
    output(worker, spec("ViewPress"), max_tokens=3)
    output(worker, spec("KeyRerotationPress", press=spec("ViewPress")), max_tokens=3)
    hook.remove()

    n = len(PROMPT)
    assert seen == [list(range(n)), [n], [n + 1], list(range(n)), [n // 2], [n // 2 + 1]]


def test_decoding_press_keeps_the_cap_of_the_prompt_after_every_token(worker, model):
    both = output(worker, spec("ViewPress"), schedule="prefill_and_decode")
    decode = output(worker, spec("ViewPress"), schedule="decode")
    presses = Presses(KVPRESS).of(spec("ViewPress"), job(None, 0.75), 12)
    pressed = Presses(KVPRESS).of(spec("ViewPress"), job(None, 0.75, "prefill_and_decode"), 12)
    nothing = Presses(KVPRESS).of(spec("ViewPress"), job(None, 0.0, "prefill_and_decode"), 12)

    assert both["visible"] == 0.5
    assert decode["visible"] == 1.0
    assert (presses.prefill.compression_ratio, presses.decode) == (0.75, None)
    assert (pressed.decode.target_size, pressed.decode.compression_interval) == (3, 1)
    assert pressed.decode.base_press.compression_ratio == 0.0
    assert nothing.decode.target_size == 12 + 4


def test_environment_without_kvpress_is_answered_with_the_reason():
    about = {"folder": "x", "dtype": "auto", "device": "cpu", "threads": 1}
    written = []

    serve(iter([json.dumps(about)]), written.append)

    assert written == [{"error": "ModuleNotFoundError: No module named 'kvpress'"}]


def test_worker_imports_nothing_of_quire():
    source = Path(worker_module.__file__).read_text(encoding="utf-8")
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Import)]
    froms = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]

    names = {alias.name for node in found for alias in node.names} | {n.module for n in froms}
    assert {"torch", "kvpress", "transformers"} <= names
    assert not [name for name in names if name.split(".")[0] == "quire"]
