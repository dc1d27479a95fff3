"""The check at load: compare a model's logits under the engine's interface with Transformers'.

Unlike a table of supported names, this check does not become outdated. A short prompt runs twice:
once in Transformers, and once as in the engine. The engine's run has two ragged sequences in one
flat batch, in two chunks, over cached keys.
"""

import logging
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from transformers import PreTrainedModel

from quire.errors import ModelError, UnsupportedModel
from quire.kernels.backend import TokenIndex
from quire.layout.model import LayerSpec, ModelSpec
from quire.models.base import AttentionCall, Comparable, SequenceStates

_log = logging.getLogger(__name__)

PROMPT_TOKENS = 24  # of the longer of the two sequences
SHORTER_TOKENS = 17
CHUNK_TOKENS = 11  # length of the first chunk of each
LONGEST_CHUNK = 256  # of chunked attention whose end a test prompt goes beyond

# Relative distance of a row of logits, ||ours - theirs|| / ||theirs - mean||. Float32 differs by
# rounding alone. In half precision a router may select another expert on some rows, hence the
# tolerated fraction of rows.
_TOLERANCE = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 1e-1}
_TOLERATED_SHARE = {torch.float32: 0.0, torch.float16: 0.25, torch.bfloat16: 0.25}


# With quantized weights, the inputs of linear layers are quantized too: a rounding error can become
# that of a code, and grows from layer to layer up to the loss of the codec itself. A wrong layer
# differs by about 1.
_LOSSES, _MAX_LOSS = 2.0, 0.6
_LARGE_LOSS = 0.5


def stored_logits(model: PreTrainedModel, spec: ModelSpec) -> list[Tensor]:
    """Logits of the test prompts by Transformers, before the weights are quantized."""
    with torch.inference_mode():
        return [
            model(tokens[None], use_cache=False, return_dict=True).logits[0].float()
            for tokens in _prompts(spec, model.device)
        ]


def compare_with_transformers(
    decoder: Comparable, stored: Sequence[Tensor] | None = None, *, codec: str = "auto"
) -> None:
    """Run a short prompt in Transformers and as in the engine, and compare the logits.

    Args:
        decoder: of the model.
        stored: `stored_logits` of a model whose weights are quantized; None: they are not.
        codec: of the quantized weights.
    """
    sequences = _prompts(decoder.spec, decoder.device)
    ours = [logits.float() for logits in _flat_logits(decoder, sequences)]
    precision = decoder.dtype if codec == "auto" else torch.bfloat16
    tolerance, share = _TOLERANCE[precision], _TOLERATED_SHARE[precision]
    for number, (tokens, logits) in enumerate(zip(sequences, ours, strict=True)):
        theirs = decoder.reference_logits(tokens).float()
        if stored is not None:
            loss = _LOSSES * float(_distances(theirs, stored[number]).median())
            tolerance = min(max(loss, _TOLERANCE[precision]), _MAX_LOSS)
        _compare(decoder, number, (logits, theirs), tolerance, share, codec)
    if stored is not None:
        loss = max(float(_distances(*pair).median()) for pair in zip(ours, stored, strict=True))
        if loss > _LARGE_LOSS:
            _log.warning(
                "weight codec %s changes the logits of a test prompt by %.0f%% of their spread; "
                "int8 loses less than int4; measure the quality with quire eval",
                *(codec, 100 * loss),
            )


def _prompts(spec: ModelSpec, device: torch.device) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = [min(PROMPT_TOKENS, spec.max_positions), min(SHORTER_TOKENS, spec.max_positions)]
    chunks = [layer.chunk for layer in spec.layers if layer.chunk]
    if chunks and max(chunks) < min(LONGEST_CHUNK, spec.max_positions):
        lengths[0] = max(lengths[0], max(chunks) + CHUNK_TOKENS)  # beyond the end of a chunk
    return [
        torch.randint(spec.vocab_size, (length,), generator=generator).to(device)
        for length in lengths
    ]


def _flat_logits(decoder: Comparable, sequences: list[Tensor]) -> list[Tensor]:
    # Logits of every position of each sequence, [tokens, vocab], computed chunk by chunk.
    dense = DenseAttention()
    rows: list[list[Tensor]] = [[] for _ in sequences]
    for chunk in (slice(None, CHUNK_TOKENS), slice(CHUNK_TOKENS, None)):
        parts = [tokens[chunk] for tokens in sequences]
        owners = [number for number, part in enumerate(parts) for _ in part]
        places = [position for part in parts for position in range(len(part))]
        positions = [(chunk.start or 0) + place for place in places]
        recorder = _Recorder(decoder, dense.batch(owners, positions, decoder.spec))
        logits = decoder.forward(
            torch.cat(parts),
            torch.tensor(positions, device=decoder.device),
            torch.arange(len(owners), device=decoder.device),
            recorder,
        )
        recorder.check_layers()
        for number, row in zip(owners, logits, strict=True):
            rows[number].append(row)
    return [torch.stack(row) for row in rows]


class _Recorder:
    # Forwards attention calls, and checks each call against the spec.

    def __init__(self, decoder: Comparable, attention: "ReferenceBatch") -> None:
        self._spec = decoder.spec
        self._dtype = decoder.dtype
        self._attention = attention
        self._layers: list[int] = []
        self._stored: dict[int, tuple[AttentionCall, Tensor, Tensor]] = {}  # by source layer

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        spec = self._spec
        self._layers.append(call.layer)
        if call.layer < spec.num_layers:
            layer, heads = spec.layers[call.layer], spec.heads[call.layer]
            shapes = {
                "query": (heads.query_heads, heads.projected_dims[0]),
                "key": (heads.kv_heads, heads.key_dim),
                "value": (heads.kv_heads, heads.value_dim),
            }
            for name, tensor in (("query", query), ("key", key), ("value", value)):
                self._expect(call, f"{name} shape", tuple(tensor.shape[1:]), shapes[name])
            self._expect(call, "window", call.window, layer.window)
            if layer.source is None:
                self._stored[call.layer] = call, key, value
            else:
                self._expect_stored(call, layer.source, key, value)
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            self._expect(call, f"{name} type", tensor.dtype, self._dtype)
        return self._attention.attend(call, query, key, value)

    @property
    def states(self) -> SequenceStates[Any]:
        return self._attention.states

    def _expect_stored(self, call: AttentionCall, source: int, key: Tensor, value: Tensor) -> None:
        """Check that a layer attends to the keys and values of another layer, as that one does."""
        stored, *found = self._stored[source]
        same = all(torch.equal(*pair) for pair in zip(found, (key, value), strict=True))
        self._expect(call, f"the keys and values of layer {source}", same, expected=True)
        self._expect(call, "scale", call.scale, stored.scale)

    def check_layers(self) -> None:
        expected = [n for n, layer in enumerate(self._spec.layers) if layer.attends]
        if self._layers != expected:
            raise UnsupportedModel(
                f"{self._spec.architecture}: expected one attention call of each of "
                f"{len(expected)} layers in order, got calls of layers {self._layers}"
            )

    def _expect(self, call: AttentionCall, what: str, got: object, expected: object) -> None:
        if got != expected:
            raise UnsupportedModel(
                f"{self._spec.architecture}: layer {call.layer} calls attention with {what} "
                f"{got}, but its config has {expected}"
            )


def _expect_finite(decoder: Comparable, theirs: Tensor) -> None:
    wrong = ~theirs.isfinite().all(dim=-1)
    if wrong.any():
        advice = "check the weights and the numbers in config.json"
        if decoder.dtype == torch.float16:
            advice = f"load with dtype=bfloat16 or float32, or {advice}"
        raise ModelError(
            f"{decoder.spec.architecture}: expected finite logits, got NaN or inf from "
            f"Transformers itself on {int(wrong.sum())} of {len(wrong)} positions of a test "
            f"sequence; {advice}"
        )


def _distances(ours: Tensor, theirs: Tensor) -> Tensor:
    """Relative distance of each row of logits."""
    spread = (theirs - theirs.mean(dim=-1, keepdim=True)).norm(dim=-1)
    least = torch.finfo(torch.float32).tiny
    return torch.as_tensor((ours - theirs).norm(dim=-1) / spread.clamp_min(least))


def _compare(
    decoder: Comparable,
    number: int,
    pair: tuple[Tensor, Tensor],
    tolerance: float,
    share: float,
    codec: str,
) -> None:
    ours, theirs = pair
    _expect_finite(decoder, theirs)
    distance = _distances(ours, theirs)
    wrong = ~(distance <= tolerance)  # not-a-number is wrong too
    if wrong.float().mean() > share:
        first = int(wrong.nonzero()[0])
        raise UnsupportedModel(
            f"{decoder.spec.architecture}: logits differ from Transformers' own on "
            f"{int(wrong.sum())} of {len(wrong)} positions of test sequence {number}, first at "
            f"position {first} by {float(distance[first]):.1e} (relative; allowed "
            f"{tolerance:.0e}); "
            + (
                "run this model with Transformers itself"
                if codec == "auto"
                else f"leave out --weight-codec {codec}, or skip the check with --no-verify"
            )
        )


# Paged attention without pages: all keys and values are retained, a full float32 softmax, one mask.
#
# The reference for fast attention, and the attention of the check at load. It is simple rather
# than fast.


@dataclass(slots=True)
class DenseLane:
    """Cached keys and values of one sequence in one layer, in the order of arrival."""

    positions: list[int] = field(default_factory=list)
    keys: list[Tensor] = field(default_factory=list)  # [num_kv_heads, head_dim] each, after RoPE
    values: list[Tensor] = field(default_factory=list)  # [num_kv_heads, value_dim] each
    index_keys: list[Tensor] = field(default_factory=list)  # [index_dim] each


class DenseAttention:
    """Attention that retains all keys and values of all sequences over any number of forwards."""

    def __init__(self) -> None:
        self._lanes: dict[tuple[Hashable, int], DenseLane] = {}
        self.states: dict[tuple[Hashable, int], dict[str, Tensor]] = {}

    def batch(
        self,
        sequences: Sequence[Hashable],
        positions: Sequence[int],
        spec: ModelSpec | None = None,
    ) -> "ReferenceBatch":
        """Return the attention of one forward; `spec` has chunks, sources and indexes of layers."""
        return ReferenceBatch(self, tuple(sequences), tuple(positions), spec)

    def lane(self, sequence: Hashable, layer: int) -> DenseLane:
        return self._lanes.setdefault((sequence, layer), DenseLane())


@dataclass(frozen=True, slots=True)
class ReferenceBatch:
    """`DenseAttention` for the rows of one forward. See `DenseAttention.batch`."""

    store: DenseAttention
    sequences: tuple[Hashable, ...]
    positions: tuple[int, ...]
    spec: ModelSpec | None = None
    marks: dict[Hashable, Tensor] = field(default_factory=dict)  # selected slots, by sequence

    @property
    def states(self) -> "_States":
        return _States(self)

    def attend(
        self,
        call: AttentionCall,
        query: Float[Tensor, "num_tokens num_heads query_dim"],
        key: Float[Tensor, "num_tokens num_kv_heads key_dim"],
        value: Float[Tensor, "num_tokens num_kv_heads value_dim"],
    ) -> Float[Tensor, "num_tokens num_heads output_dim"]:
        value_dim = value.shape[2] if call.latent is None else call.latent.value_dim
        out = query.new_empty(*query.shape[:2], value_dim)
        layer = LayerSpec() if self.spec is None else self.spec.layers[call.layer]
        owner_layer = call.layer if layer.source is None else layer.source
        for sequence in dict.fromkeys(self.sequences):
            rows = [row for row, owner in enumerate(self.sequences) if owner == sequence]
            lane = self.store.lane(sequence, owner_layer)
            at = [self.positions[row] for row in rows]
            if layer.source is None:
                lane.positions.extend(at)
                lane.keys.extend(key[rows])
                lane.values.extend(value[rows])
            seen = visible(call, at, lane.positions, layer.chunk)
            if call.index is not None:
                seen &= self._selected(call, call.index, rows, lane, seen)
            out[rows] = _attend(call, query[rows], lane, seen)
        return out

    def _selected(
        self, call: AttentionCall, index: TokenIndex, rows: list[int], lane: DenseLane, seen: Tensor
    ) -> Tensor:
        """Mark the slots that the index selects; layers without an index use the last marks."""
        heads = None if self.spec is None else self.spec.heads[call.layer]
        sequence = self.sequences[rows[0]]
        if heads is None or heads.index is None or heads.index.dim:
            lane.index_keys.extend(index.key[rows])
            keys = torch.stack(lane.index_keys).float()
            products = torch.einsum("qhd,sd->hqs", index.query[rows].float(), keys) * index.scale
            scores = torch.einsum("qh,hqs->qs", index.weights[rows], products.relu())
            scores = scores.masked_fill(~seen.to(scores.device), -torch.inf)
            slots = scores.topk(min(index.topk, len(keys)), dim=1).indices
            marks = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, slots, value=True)
            self.marks[sequence] = marks.to(seen.device)
        return self.marks[sequence]


@dataclass(frozen=True, slots=True)
class _Rows:
    """Tokens of one sequence in a batch."""

    sequence: Hashable
    tokens: Tensor

    @property
    def length(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True, slots=True)
class _States:
    """Recurrent states of the sequences of a batch; each runs alone."""

    batch: ReferenceBatch

    @property
    def parts(self) -> list[_Rows]:
        sequences = self.batch.sequences
        return [
            _Rows(one, torch.tensor([n for n, owner in enumerate(sequences) if owner == one]))
            for one in dict.fromkeys(sequences)
        ]

    def load(self, layer: int, part: _Rows) -> dict[str, Tensor] | None:
        found = self.batch.store.states.get((part.sequence, layer))
        return None if found is None else {name: state.clone() for name, state in found.items()}

    def in_pages(self, layer: int, part: _Rows) -> None:
        return None

    def store(self, layer: int, part: _Rows, states: Mapping[str, Tensor]) -> None:
        shapes = {name: tuple(state.shape[1:]) for name, state in states.items()}
        spec = self.batch.spec
        state = None if spec is None else spec.layers[layer].state
        expected = {} if state is None else state.shapes
        if spec is not None and shapes != expected:
            raise UnsupportedModel(
                f"{spec.architecture}: layer {layer} has recurrent states of shapes {shapes}, but "
                f"its config has {expected}"
            )
        self.batch.store.states[part.sequence, layer] = dict(states)


def visible(
    call: AttentionCall, queries: Sequence[int], slots: Sequence[int], chunk: int | None = None
) -> Bool[Tensor, "num_queries num_slots"]:
    """Whether each query attends to each slot: none after it, none outside its window or chunk."""
    at, slot = torch.tensor(queries).unsqueeze(1), torch.tensor(slots).unsqueeze(0)
    seen = slot <= at
    if chunk is not None:
        seen &= slot >= at // chunk * chunk
    return seen if call.window is None else seen & (at - slot < call.window)


def _attend(call: AttentionCall, query: Tensor, lane: DenseLane, seen: Tensor) -> Tensor:
    stacked = (torch.stack(x).float().transpose(0, 1) for x in (lane.keys, lane.values))
    heads = [x.float().transpose(0, 1) for x in call.math.heads(*stacked)]  # [slots, heads, dim]
    group = query.shape[1] // heads[0].shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in heads)

    products = torch.einsum("qhd,shd->hqs", query.float(), keys) * call.scale
    if call.softcap is not None:
        products = call.softcap * torch.tanh(products / call.softcap)
    if call.alibi is not None:
        positions = torch.tensor(lane.positions, device=query.device)
        products = products + call.alibi.bias(positions, positions[-1:])[:, None]
    products = products.masked_fill(~seen.to(query.device), -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.float().view(-1, 1, 1).expand(-1, query.shape[0], 1)
        products = torch.cat([products, sinks], dim=-1)
    weights = products.softmax(dim=-1)[..., : len(lane.keys)]  # a sink has weight, but no value
    return torch.einsum("hqs,shd->qhd", weights, values).to(query.dtype)
