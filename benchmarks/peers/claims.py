"""Claims of a part: Quire's numbers over those of other engines, paired within rounds."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from benchmarks.common.result import Numbers
from benchmarks.peers.config import MAIN_MODEL, Shape
from benchmarks.peers.engines import (
    OPENVINO,
    OPENVINO_EVICT,
    OPENVINO_KVCRUSH,
    VLLM,
    Engine,
)
from benchmarks.peers.measures import Measures, Number, Rounds, median, paired, runs_of

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
