"""Gain of prompt lookup of one user in Quire, OpenVINO and llama.cpp, on the same prompts.

    make peers
    python -m benchmarks.guides.speculative_peers smollm2

Every round runs each kind of text in each engine without proposals and with them, one after the
other, each in a new process, with weights in bfloat16. Rates are output tokens per second after the
first token. The last line of output is one JSON object.
"""

import json
import statistics
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.guides.speculative import encoded, prompts_of
from benchmarks.peers.config import Eviction, PeersConfig
from benchmarks.peers.engines import LLAMACPP, OPENVINO, Engine, peer_engines, quire_engine
from benchmarks.peers.environments import FOLDER
from benchmarks.peers.part import Failure, run_worker
from benchmarks.peers.workers.protocol import Job
from quire.cli.report import envelope
from quire.errors import ConfigError
from quire.models.checkpoint import Checkpoint, open_checkpoint

KINDS = ("rewrite", "code", "prose")
TOKENS = 8
WARM_TOKENS = 64


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, and print the result as one line of JSON."""
    parsed = _parse(arguments)
    config = PeersConfig(
        models=(), shapes=(), engines=(), environments=parsed.environments.resolve(), files=Path()
    )
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = open_checkpoint(parsed.model)
        checkpoint.config.save_pretrained(folder)
        model = checkpoint.read_model(torch.bfloat16)
        weights = model.state_dict()
        if checkpoint.config.tie_word_embeddings:
            del weights["lm_head.weight"]
        save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
        rates = _rates(parsed, config, Path(folder), _prompts(checkpoint, parsed.rounds))
    claims: dict[str, int | float] = {}
    for (engine, kind), pairs in rates.items():
        gains = [new / old for old, new in pairs]
        claims[f"{engine}_{kind}_gain"] = statistics.median(gains)
        claims[f"{engine}_{kind}_plain_tokens_per_s"] = statistics.median(old for old, _ in pairs)
        claims[f"{engine}_{kind}_tokens_per_s"] = statistics.median(new for _, new in pairs)
    options = {name: str(value) for name, value in vars(parsed).items()}
    print(json.dumps(envelope("speculative_peers", claims, {}, options)))


def _rates(
    parsed: Namespace, config: PeersConfig, model: Path, texts: Mapping[str, list[list[int]]]
) -> Mapping[tuple[str, str], list[tuple[float, float]]]:
    """Tokens/s without and with proposals of each round, by engine and kind of text."""
    rates: dict[tuple[str, str], list[tuple[float, float]]] = {}
    pairs = _pairs(parsed.tokens)
    for plain, _ in pairs.values():
        if plain.prepares:
            _run(plain, config, _job("prepare", model, plain, [], 0))
    for number in range(parsed.rounds):
        for kind in KINDS:
            prompt, warm = texts[kind][number], texts[kind][number - 1][:300]
            for name, pair in pairs.items():
                found = []
                for engine in pair:
                    job = _job("run", model, engine, prompt, parsed.output_tokens)
                    result = _run(engine, config, job | {"warmup_prompts": [warm]})
                    times_s = result["times_s"][0]
                    later = sum(time_s > times_s[0] for time_s in times_s)
                    found.append(later / (times_s[-1] - times_s[0]))
                rates.setdefault((name, kind), []).append((found[0], found[1]))
                print(name, kind, number, [round(rate, 1) for rate in found], flush=True)
    return rates


def _pairs(tokens: int) -> dict[str, tuple[Engine, Engine]]:
    """Each engine without proposals and with them."""
    others = {engine.name: engine for engine in peer_engines(Eviction())}
    quire = quire_engine(f"quire=--speculative ngram:tokens={tokens}")
    return {
        "quire": (quire_engine("quire="), quire),
        **{
            name: (
                replace(others[name], options={"lookup": 0}),
                replace(others[name], options={"lookup": tokens}),
            )
            for name in (OPENVINO, LLAMACPP)
        },
    }


def _run(engine: Engine, config: PeersConfig, job: Mapping[str, Any]) -> dict[str, Any]:
    found = run_worker(engine, Job(**job), config)  # type: ignore[typeddict-item]
    if isinstance(found, Failure):
        raise ConfigError(f"{engine.name}: {found.reason}")
    return found


def _job(task: str, model: Path, engine: Engine, prompt: list[int], tokens: int) -> dict[str, Any]:
    slot = 1 << 18
    return {
        "task": task,
        "model": str(model),
        "prepared": str(model / engine.environment),
        "dtype": "bfloat16",
        "threads": 2,
        "prompts": [prompt],
        "new_tokens": [tokens],
        "warmup_prompts": [],
        "warmup_tokens": WARM_TOKENS,
        "kv_bytes": slot * 2_048,
        "kv_bytes_per_token": slot // 4,
        "max_num_batched_tokens": 2_048,
        "options": dict(engine.options),
    }


def _prompts(checkpoint: Checkpoint, rounds: int) -> dict[str, list[list[int]]]:
    tokenizer = checkpoint.load_tokenizer()
    assert tokenizer is not None, "a chat model has one"
    return {
        kind: list(encoded(tokenizer, [prompts_of(kind, i) for i in range(rounds)]))
        for kind in KINDS
    }


def _parse(arguments: Sequence[str] | None) -> Namespace:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("model", help="smollm2, or a GGUF file of an architecture like Llama")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="proposed tokens of a step")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--environments", type=Path, default=FOLDER)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    main()
