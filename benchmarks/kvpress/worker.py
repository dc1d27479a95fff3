"""The process that runs kvpress: `PYTHON worker.py`, with the Python of another environment.

It imports nothing of Quire: that environment has its own version of Transformers. It reads JSON
lines from standard input, first the model, then jobs, and writes one JSON line for each of them.

As in kvpress's pipeline a press acts on the prefill of the context. The question (the last
`question_tokens` of a prompt) is computed after it, without a press. These and later tokens get the
positions that follow the context; the retained keys keep theirs. Only `KeyRerotationPress`
re-rotates keys, and tokens then follow the retained ones.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch

PRESS_ERRORS = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    ImportError,
    LookupError,
    NotImplementedError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of presses for a model, a prompt or a budget that they do not support."""

EAGER = ("ObservedAttentionPress", "KVComposePress")
"""Presses that read the attention weights of the forward pass."""

_REROTATING = "KeyRerotationPress"


@dataclass(slots=True)
class Pressed:
    """How a press acts on one prompt.

    Attributes:
        prefill: the press of the prefill; None: the prefill retains all tokens.
        decode: the press of the steps after it; None: they retain all tokens.
        is_rerotated: whether tokens after the prompt follow the retained ones.
    """

    prefill: Any
    decode: Any
    is_rerotated: bool


def stored_bytes(cache: Any) -> int:
    """Bytes of the memory that holds the tensors of a cache."""
    tensors = [x for layer in cache.layers for x in (layer.keys, layer.values) if x is not None]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in tensors}
    return sum(storages.values())


def class_names(spec: Mapping[str, Any]) -> Iterator[str]:
    """Names of the classes in a press."""
    yield spec["name"]
    for value in spec["options"].values():
        if isinstance(value, dict):
            yield from class_names(value)


class Presses:
    """Creates presses from their texts.

    Args:
        module: kvpress.
    """

    def __init__(self, module: Any) -> None:
        self._module = module

    def names(self) -> list[str]:
        """Names of all classes of presses."""
        base = self._module.BasePress
        exported = ((name, getattr(self._module, name)) for name in dir(self._module))
        found = [name for name, x in exported if isinstance(x, type) and issubclass(x, base)]
        return [name for name in found if name not in ("BasePress", "ScorerPress")]

    def of(self, spec: Mapping[str, Any], job: Mapping[str, Any], num_tokens: int) -> Pressed:
        """The presses of a prompt.

        Args:
            spec: name and options of the press.
            job: the job.
            num_tokens: length of the prompt.
        """
        names, schedule = list(class_names(spec)), job["schedule"]
        is_rerotated = _REROTATING in names
        if schedule == "prefill_end":
            return Pressed(self._press(spec, job["removed"]), None, is_rerotated)
        decode = self._decoding(spec, self._kept(job, num_tokens))
        base = spec["options"].get("base_press", spec)
        prefill = self._press(base, job["removed"]) if schedule == "prefill_and_decode" else None
        return Pressed(prefill, decode, is_rerotated)

    def _kept(self, job: Mapping[str, Any], num_tokens: int) -> int:
        if not job["removed"]:
            return num_tokens + max(int(request["max_tokens"]) for request in job["requests"])
        return max(1, int(num_tokens * (1 - job["removed"])))

    def _class(self, name: str) -> Any:
        if name not in self.names():
            raise ValueError(f"this version of kvpress has no press {name!r}")
        return getattr(self._module, name)

    def _press(self, spec: Mapping[str, Any], removed: float) -> Any:
        kind = self._class(spec["name"])
        if issubclass(kind, self._module.DecodingPress):
            raise ValueError(f"{spec['name']} compresses during decode only")
        options = {
            name: self._press(value, removed) if isinstance(value, dict) else value
            for name, value in spec["options"].items()
        }
        if "compression_ratio" in signature(kind).parameters:
            return kind(compression_ratio=removed, **options)
        if not hasattr(kind, "compression_ratio"):
            raise ValueError(f"{spec['name']} has no compression ratio")
        press = kind(**options)
        press.compression_ratio = removed
        return press

    def _decoding(self, spec: Mapping[str, Any], kept: int) -> Any:
        """A press that compresses to `kept` tokens after every token."""
        kind, options = self._module.DecodingPress, {"base_press": spec}
        if issubclass(self._class(spec["name"]), kind):
            kind, options = self._class(spec["name"]), spec["options"]
        made = {n: self._press(x, 0.0) if isinstance(x, dict) else x for n, x in options.items()}
        return kind(compression_interval=1, target_size=kept, **made)


class Worker:
    """Generates with presses.

    Args:
        presses: creates presses.
        model, tokenizer: of Transformers.
    """

    def __init__(self, presses: Presses, model: Any, tokenizer: Any) -> None:
        self._presses, self._model, self._tokenizer = presses, model, tokenizer
        self._cache: Any = None
        self._peak_bytes = 0
        self._undecodable_ids: list[int] = []
        for layer in model.model.layers:  # before the hooks of presses, which are called later
            layer.self_attn.register_forward_hook(self._watch)

    def run(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """Generate the outputs of a job, one prompt after the other."""
        spec = job["press"]
        names = set(class_names(spec)) if spec else set()
        self._model.set_attn_implementation("eager" if names & set(EAGER) else "sdpa")
        torch.manual_seed(0)
        started = time.perf_counter()
        outputs, self._undecodable_ids = [], job["undecodable_ids"]
        for request in job["requests"]:
            num_tokens = len(request["token_ids"]) - request["question_tokens"]
            pressed = (
                self._presses.of(spec, job, num_tokens) if spec else Pressed(None, None, False)
            )
            outputs.append(self._generate(request, pressed, job["eos_token_ids"]))
        return {"outputs": outputs, "seconds": time.perf_counter() - started}

    def _watch(self, _module: Any, _inputs: Any, _output: Any) -> None:
        if self._cache is not None:
            self._peak_bytes = max(self._peak_bytes, stored_bytes(self._cache))

    @torch.no_grad()
    def _generate(
        self, request: Mapping[str, Any], pressed: Pressed, eos_token_ids: Sequence[int]
    ) -> dict[str, Any]:
        from transformers import DynamicCache

        prompt, cache = request["token_ids"], DynamicCache()
        num_tokens = len(prompt) - request["question_tokens"]
        context, question = prompt[:num_tokens], prompt[num_tokens:]
        self._cache, self._peak_bytes = cache, 0
        for layer in self._model.model.layers:  # eager attention does not reset it
            layer.self_attn.masked_key_indices = None
        with self._applied(pressed.prefill):
            logits = self._logits(context, range(num_tokens), cache)
        retained_bytes, visible = stored_bytes(cache), self._visible(cache, num_tokens)
        first = cache.get_seq_length() if pressed.is_rerotated else num_tokens
        if question:
            logits = self._logits(question, range(first, first + len(question)), cache)
            first += len(question)
        token_ids = [int(logits.argmax())]
        with self._applied(pressed.decode):
            while not self._is_finished(token_ids, request, eos_token_ids):
                position = first + len(token_ids) - 1
                logits = self._logits(token_ids[-1:], [position], cache)
                token_ids.append(int(logits.argmax()))
        return {
            "token_ids": token_ids,
            "peak_bytes": max(self._peak_bytes, stored_bytes(cache)),
            "retained_bytes": retained_bytes,
            "visible": visible,
        }

    def _applied(self, press: Any) -> AbstractContextManager[Any]:
        found: AbstractContextManager[Any] = nullcontext() if press is None else press(self._model)
        return found

    def _logits(self, token_ids: Sequence[int], positions: Sequence[int], cache: Any) -> Any:
        device = self._model.device
        found = self._model(
            input_ids=torch.tensor([list(token_ids)], device=device),
            position_ids=torch.tensor([list(positions)], device=device),
            past_key_values=cache,
            logits_to_keep=1,
        )
        return found.logits[0, -1].index_fill(
            0, torch.tensor(self._undecodable_ids, dtype=torch.int64, device=device), -torch.inf
        )

    def _is_finished(
        self, token_ids: list[int], request: Mapping[str, Any], eos_token_ids: Sequence[int]
    ) -> bool:
        if len(token_ids) >= request["max_tokens"] or token_ids[-1] in eos_token_ids:
            return True
        text = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return any(stop in text for stop in request["stop"])

    def _visible(self, cache: Any, num_tokens: int) -> float:
        """Fraction of a prompt's keys, over layers and heads, that the next token can read."""
        seen = total = 0
        for layer, module in zip(cache.layers, self._model.model.layers, strict=True):
            heads = layer.keys.shape[1]
            masked = getattr(module.self_attn, "masked_key_indices", None)
            seen += heads * layer.keys.shape[2] - (0 if masked is None else len(masked[0]))
            total += heads * num_tokens
        return float(seen / total)


def opened(model: Mapping[str, Any]) -> tuple[Worker, dict[str, Any]]:
    """The worker of a model, and the message about its environment."""
    from importlib.metadata import version

    import kvpress
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(model["threads"])
    source = {"pretrained_model_name_or_path": model["folder"], "gguf_file": model["gguf_file"]}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=model["dtype"])
    loaded = loaded.to(model["device"]).eval()
    presses = Presses(kvpress)
    packages = ("kvpress", "transformers", "torch")
    about = {"versions": {name: version(name) for name in packages}, "presses": presses.names()}
    return Worker(presses, loaded, AutoTokenizer.from_pretrained(**source)), about


def serve(lines: Iterator[str], write: Callable[[Mapping[str, Any]], None]) -> None:
    """Answer every line with one message: a result, or `{"error": reason}`."""
    try:
        worker, about = opened(json.loads(next(lines)))
    except PRESS_ERRORS as error:
        write({"error": _reason(error)})
        return
    write(about)
    for line in lines:
        try:
            write(worker.run(json.loads(line)))
        except PRESS_ERRORS as error:
            write({"error": _reason(error)})


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return f"{type(error).__name__}: {lines[0]}"


if __name__ == "__main__":
    messages = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what packages print must not mix with the messages
    serve(iter(sys.stdin), lambda found: print(json.dumps(found), file=messages, flush=True))
