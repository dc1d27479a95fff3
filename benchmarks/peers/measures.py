"""Cells of the benchmark: the job of each run, its stored result, medians and claims."""

import json
import os
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.common.models import SHAPES
from benchmarks.common.result import Numbers
from benchmarks.peers.config import ELEMENT_BYTES, MAIN_MODEL, PeersConfig, Shape
from benchmarks.peers.engines import (
    OPENVINO,
    OPENVINO_EVICT,
    OPENVINO_KVCRUSH,
    VLLM,
    Engine,
)
from benchmarks.peers.workers.protocol import Job
from quire.errors import InvariantError

WARMUP_PROMPTS, WARMUP_TOKENS = 4, 4


def kv_bytes_per_token(model: str) -> int:
    """KV bytes of a token of this model, with elements of 2 bytes."""
    config = SHAPES[model]()
    heads = config.num_key_value_heads or config.num_attention_heads
    head_dim: int = config.head_dim or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * heads * head_dim * ELEMENT_BYTES


def random_prompts(lengths: list[int], vocab_size: int, seed: int) -> list[list[int]]:
    """Random token ids; the same arguments give the same prompts in every process."""
    rng = random.Random(seed)
    return [[rng.randrange(vocab_size) for _ in range(length)] for length in lengths]


def build_job(config: PeersConfig, model: str, shape: Shape, engine: Engine, round_: int) -> Job:
    """The job of one engine in one round; rounds differ in their prompts.

    Args:
        config: the configuration.
        model: name of the model.
        shape: the work.
        engine: the engine.
        round_: number of the round, which seeds the prompts.
    """
    vocab_size = SHAPES[model]().vocab_size
    lengths = [prompt for prompt, _ in shape.lengths]
    warmup = random_prompts(lengths[:WARMUP_PROMPTS], vocab_size, seed=-1 - round_)
    token_bytes = kv_bytes_per_token(model)
    return Job(
        task="run",
        model=str(config.files / model),
        prepared=str(config.files / prepared_name(model, engine, config.dtype)),
        dtype=config.dtype,
        threads=config.threads,
        prompts=random_prompts(lengths, vocab_size, seed=round_),
        new_tokens=[new for _, new in shape.lengths],
        warmup_prompts=warmup,
        warmup_tokens=WARMUP_TOKENS,
        kv_bytes=shape.kv_bytes(token_bytes),
        kv_bytes_per_token=token_bytes,
        max_num_batched_tokens=config.max_num_batched_tokens,
        options=dict(engine.options),
    )


def prepared_name(model: str, engine: Engine, dtype: str) -> str:
    """Folder name of a model in the engine's own format."""
    return f"{model}-{engine.environment}-{dtype}" if engine.prepares else model


# ---- medians -------------------------------------------------------------------------------------

_COPIED = (
    "version", "weights_type", "weight_bytes", "kv_type", "kv_bytes", "load_s", "total_s",
    "peak_rss_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Numbers of one run of an engine.

    Attributes:
        version: version of the engine.
        weights_type, kv_type: element types.
        weight_bytes, kv_bytes: sizes of weights and of KV memory.
        load_s: time to load and warm up.
        total_s: time from the first prompt to the last token.
        prefill_s: time until every prompt has its first token.
        decode_tokens_per_s: tokens after `prefill_s` over the time after it; None without such
            tokens.
        first_token_s: time to the first token, median over the prompts.
        max_at_once: most requests that had their first token and not yet their last one.
        peak_rss_bytes: peak resident memory.
        new_tokens: generated tokens.
        judged: output tokens of the first prompts.
        figures: further numbers of the engine.
    """

    version: str
    weights_type: str
    weight_bytes: int
    kv_type: str
    kv_bytes: int
    load_s: float
    total_s: float
    prefill_s: float
    decode_tokens_per_s: float | None
    first_token_s: float
    max_at_once: int
    peak_rss_bytes: int
    new_tokens: int
    judged: list[list[int]]
    figures: dict[str, Any] = field(default_factory=dict)

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens per second, with prefill included in the time."""
        return self.new_tokens / self.total_s


def measures_of(result: Mapping[str, Any], shape: Shape, judged_prompts: int) -> Measures:
    """Numbers of a worker's result.

    Raises:
        InvariantError: the outputs do not have the requested lengths.
    """
    expected = [new for _, new in shape.lengths]
    got = [len(tokens) for tokens in result["tokens"]]
    if got != expected or [len(times_s) for times_s in result["times_s"]] != expected:
        raise InvariantError(
            f"expected {len(expected)} outputs of {sum(expected)} tokens with a time each, got "
            f"{len(got)} outputs of {sum(got)} tokens"
        )
    firsts = [times_s[0] for times_s in result["times_s"]]
    prefill_s, total_s = max(firsts), result["total_s"]
    later = sum(time_s > prefill_s for times_s in result["times_s"] for time_s in times_s)
    return Measures(
        **{name: result[name] for name in _COPIED},
        prefill_s=prefill_s,
        decode_tokens_per_s=later / (total_s - prefill_s) if later else None,
        first_token_s=statistics.median(firsts),
        max_at_once=max_at_once(result["times_s"]),
        new_tokens=sum(expected),
        judged=[list(tokens) for tokens in result["tokens"][:judged_prompts]],
        figures=dict(result.get("figures", {})),
    )


def max_at_once(times_s: Sequence[Sequence[float]]) -> int:
    """Largest number of requests between their first and last token, from their token times."""
    changes = sorted(
        change for times in times_s for change in ((times[0], 1), (times[-1], -1)) if times
    )
    return max(accumulate((by for _, by in changes), initial=0))


Number = Callable[[Measures], float | None]


def median(runs: Sequence[Measures], number: Number) -> float | None:
    """Median of a number over runs; None if a run does not have it."""
    found = [number(run) for run in runs]
    known = [value for value in found if value is not None]
    return statistics.median(known) if known and len(known) == len(found) else None


Rounds = Sequence[Mapping[str, Measures]]
"""The engines that ran in each round, by name."""


def runs_of(rounds: Rounds, engine: str) -> list[Measures]:
    """All runs of an engine."""
    return [found[engine] for found in rounds if engine in found]


def paired(rounds: Rounds, engine: str, other: str, number: Number) -> float | None:
    """Ratio of a number of two engines: median over the rounds in which both ran; None if none."""
    ratios = []
    for found in rounds:
        if engine in found and other in found:
            above, below = number(found[engine]), number(found[other])
            if above is not None and below:
                ratios.append(above / below)
    return statistics.median(ratios) if ratios else None


# ---- stored cells --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CellKey:
    """Key of a cell: one process of one engine.

    Attributes:
        model, shape, engine: names.
        options: options of the engine's worker, as JSON text.
        round: number of the round.
        threads, dtype, max_num_batched_tokens: of the configuration.
        lengths: prompt and output tokens of each request, as JSON text.
        kv_share: size of the KV memory over what all requests need.
        commit: commit of the code; None outside a checkout.
    """

    model: str
    shape: str
    engine: str
    options: str
    round: int
    threads: int
    dtype: str
    max_num_batched_tokens: int
    lengths: str
    kv_share: float
    commit: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A finished cell: numbers, or an error.

    Attributes:
        key: key of the cell.
        measures: its numbers; None after an error.
        error: the error; "" if there is none.
    """

    key: CellKey
    measures: Measures | None
    error: str = ""

    def to_json(self) -> dict[str, Any]:
        """Convert to JSON values."""
        return asdict(self)

    @classmethod
    def from_json(cls, stored: dict[str, Any]) -> "Cell":
        """Convert from the JSON values of `to_json`."""
        found = stored["measures"]
        return cls(
            key=CellKey(**stored["key"]),
            measures=None if found is None else Measures(**found),
            error=stored["error"],
        )


def cell_key(
    config: PeersConfig, model: str, shape: Shape, engine: Engine, round_: int, commit: str | None
) -> CellKey:
    """Key of a cell."""
    return CellKey(
        model=model,
        shape=shape.name,
        engine=engine.name,
        options=json.dumps(engine.options, sort_keys=True),
        round=round_,
        threads=config.threads,
        dtype=config.dtype,
        max_num_batched_tokens=config.max_num_batched_tokens,
        lengths=json.dumps(shape.lengths),
        kv_share=shape.kv_share,
        commit=commit,
    )


class Cells:
    """Store of cells without errors: a resumed run repeats the failed ones.

    Args:
        path: path of the file, created with the first cell; None: nothing is stored.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known: dict[CellKey, Cell] = {}
        text = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
        for line in text.splitlines():
            try:
                cell = Cell.from_json(json.loads(line))
            except (json.JSONDecodeError, KeyError, TypeError):
                continue  # incomplete, or of another version
            self._known[cell.key] = cell

    def find(self, key: CellKey) -> Cell | None:
        """The stored cell, if there is one."""
        return self._known.get(key)

    def add(self, cell: Cell) -> None:
        """Store a cell, unless it failed."""
        if cell.measures is not None:
            self._known[cell.key] = cell
            self._append(cell.to_json())

    def _append(self, stored: Mapping[str, Any]) -> None:
        if self._path is None:
            return
        with self._path.open("a+b") as file:
            if file.tell():  # an interrupted run may have left an incomplete line
                file.seek(-1, os.SEEK_END)
                file.write(b"" if file.read(1) == b"\n" else b"\n")
            file.write(json.dumps(stored).encode() + b"\n")


def interleaved(engines: Sequence[Engine], repeats: int) -> Iterator[tuple[int, Engine]]:
    """Rounds of all engines; each round starts one engine later, so that none is always first."""
    for round_ in range(repeats):
        first = round_ % len(engines)
        for engine in (*engines[first:], *engines[:first]):
            yield round_, engine


# ---- claims --------------------------------------------------------------------------------------

_SAME_BYTES = 0.9
"""A peer's weights are smaller than Quire's below this ratio of their bytes."""
_USERS = {1: "one_user", 8: "eight_users"}
MANY_PROMPTS = 32


def total_s(run: Measures) -> float:
    """Time of the whole work."""
    return run.total_s


def tokens_per_s(run: Measures) -> float:
    """Generated tokens over the time of the whole work."""
    return run.tokens_per_s


def decode_rate(run: Measures) -> float | None:
    """Decoded tokens per second."""
    return run.decode_tokens_per_s


@dataclass(frozen=True, slots=True)
class Found:
    """Claims, and the peers that they compare with.

    Attributes:
        claims: values by claim.
        best_peers: name of the compared engine by claim.
    """

    claims: Numbers = field(default_factory=dict)
    best_peers: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, value: float | None, peer: str) -> None:
        """Add a claim; None adds nothing."""
        if value is not None:
            self.claims[name] = value
            self.best_peers[name] = peer


def claim_name(name: str, model: str) -> str:
    """Name of a claim; claims on other models than the main one end with the model."""
    return name if model == MAIN_MODEL else f"{name}_{model}"


def part_claims(model: str, shape: Shape, rounds: Rounds, engines: Iterable[Engine]) -> Found:
    """Claims of one model and shape.

    total_vs_best_peer_SHAPE: Quire's total time over that of the fastest peer with full KV.
    one_user_vs_best_peer, eight_users_vs_best_peer: Quire's decoded tokens per second over those of
        the fastest peer whose weights do not have fewer bytes.
    fixed_kv_vs_openvino_full, fixed_kv_vs_vllm: tokens per second in equal KV bytes.
    fixed_kv_vs_openvino_evicting, fixed_kv_vs_openvino_kvcrush: the same, both with eviction.

    Args:
        model: name of the model.
        shape: the work.
        rounds: measurements.
        engines: all engines; the first Quire without and the first with eviction are compared.
    """
    engines = list(engines)
    quire = _first_quire(engines, evicts=False)
    found = Found()
    if shape.is_fixed:
        evicting = _first_quire(engines, evicts=True)
        for name, ours, peer in (
            ("openvino_full", quire, OPENVINO),
            ("vllm", quire, VLLM),
            ("openvino_evicting", evicting, OPENVINO_EVICT),
            ("openvino_kvcrush", evicting, OPENVINO_KVCRUSH),
        ):
            value = paired(rounds, ours, peer, tokens_per_s)
            found.add(claim_name(f"fixed_kv_vs_{name}", model), value, peer)
        return found
    peers = [e.name for e in engines if not e.is_quire and not e.evicts]
    fastest = best_peer(rounds, peers, lambda run: -run.total_s)
    if fastest is not None:
        name = claim_name(f"total_vs_best_peer_{shape.name.replace('+', '_')}", model)
        found.add(name, paired(rounds, quire, fastest, total_s), fastest)
    if len(shape.lengths) in _USERS:
        same = [peer for peer in peers if not _has_smaller_weights(rounds, peer, quire)]
        fastest = best_peer(rounds, same, decode_rate)
        if fastest is not None:
            name = claim_name(f"{_USERS[len(shape.lengths)]}_vs_best_peer", model)
            found.add(name, paired(rounds, quire, fastest, decode_rate), fastest)
    return found


def worst_totals(parts: Mapping[tuple[str, Shape], Numbers]) -> Numbers:
    """Claim total_vs_best_peer of each model: the largest of its shapes with many equal requests.

    Args:
        parts: claims by model and shape.
    """
    worst: Numbers = {}
    for (model, shape), claims in parts.items():
        if len(shape.lengths) < MANY_PROMPTS or len(set(shape.lengths)) > 1:
            continue
        for name, value in claims.items():
            if name.startswith("total_vs_best_peer_"):
                whole = claim_name("total_vs_best_peer", model)
                worst[whole] = max(value, worst.get(whole, value))
    return worst


def best_peer(rounds: Rounds, peers: Iterable[str], number: Number) -> str | None:
    """The peer with the largest median of a number; None if no peer has it."""
    rated = {peer: median(runs_of(rounds, peer), number) for peer in peers}
    known = {peer: value for peer, value in rated.items() if value is not None}
    return max(known, key=lambda peer: known[peer]) if known else None


def _first_quire(engines: Iterable[Engine], *, evicts: bool) -> str:
    names = [engine.name for engine in engines if engine.is_quire and engine.evicts == evicts]
    return names[0] if names else ""


def _has_smaller_weights(rounds: Rounds, peer: str, quire: str) -> bool:
    ratio = paired(rounds, peer, quire, lambda run: float(run.weight_bytes))
    return ratio is not None and ratio < _SAME_BYTES
