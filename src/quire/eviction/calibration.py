"""Measures the constants of codecs on a model, errors of codecs in its attention, retrieval heads.

A text is processed without KV memory. Constants are measured on the keys and values of its first
three quarters, errors on those of the last quarter. For retrieval heads see `retrieval_scores`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Float
from torch import Tensor

from quire.codecs.base import Codec
from quire.codecs.registry import make_codec
from quire.errors import ConfigError
from quire.kernels.backend import AttentionMath
from quire.kernels.dense import attend_dense
from quire.kernels.latent import folded
from quire.kv.coded_layers import KEY, VALUE, Constants, MeasuredConstants, sides_of
from quire.layout.codecs import CodecSpec
from quire.layout.kv_format import KVFormat
from quire.layout.model import ModelSpec
from quire.models.base import AttentionCall, Decoder, OneSequence

MEASURED_SHARE = 0.75  # fraction of tokens for constants; errors are measured on the rest
MIN_TOKENS = 64
LONGEST_SEQUENCE_TOKENS = 2048
ERROR_QUERIES = 256  # per layer
STREAMING_SINKS, STREAMING_PARTS = 4, 8


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """Queries, keys and values of a layer for the tokens of a text, float32 in CPU memory.

    Attributes:
        query: [num_heads, token, head_dim], after RoPE; folded if values are latents.
        key: [num_kv_heads, token, head_dim], after RoPE.
        value: [num_kv_heads, token, value_dim].
        layer: its number in the model.
    """

    query: Float[Tensor, "head token head_dim"]
    key: Float[Tensor, "kv_head token head_dim"]
    value: Float[Tensor, "kv_head token value_dim"]
    layer: int


@dataclass(frozen=True, slots=True)
class LayerError:
    """Errors of codecs in a layer, on tokens that were not used for constants.

    Attributes:
        product: root mean square error of the products of queries and keys, relative to their
            variation from key to key.
        value: norm of the error of the values, relative to the norm of the values.
    """

    product: float
    value: float


@dataclass(slots=True)
class _Listening:
    """Attention within a text, which records its inputs."""

    model: ModelSpec
    states: OneSequence
    layers: list[int] = field(default_factory=list)
    heard: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        math, query = folded(call.math, query)
        by_head = [x.transpose(0, 1) for x in (query, key, value)]
        self.layers.append(call.layer)
        self.heard.append((by_head[0], by_head[1], by_head[2]))
        return _attended(self.model, call, math, by_head)


@dataclass(slots=True)
class _Streaming:
    """Attention within a text, which compares it with that of streaming heads.

    Attributes:
        model, states: as above.
        rows: tokens whose attention is compared.
        changes: relative change of the output of each layer and KV head.
    """

    model: ModelSpec
    states: OneSequence
    rows: Tensor
    changes: dict[tuple[int, int], list[float]] = field(default_factory=dict)

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        math, query = folded(call.math, query)
        by_head = [x.transpose(0, 1) for x in (query, key, value)]
        out = _attended(self.model, call, math, by_head)
        source = self.model.layers[call.layer].source
        layer = call.layer if source is None else source
        if not self.model.layers[layer].stores_all:
            return out
        tokens, device = len(query), query.device
        near = _seen(tokens, max(1, tokens // STREAMING_PARTS), None, device)
        sinks = torch.arange(tokens, device=device) < STREAMING_SINKS
        near |= _seen(tokens, None, None, device) & sinks
        exact, other = (
            x[self.rows].double().view(len(self.rows), len(by_head[1]), -1)
            for x in (out, _attended(self.model, call, math, by_head, near))
        )
        change = (exact - other).norm(dim=2) / exact.norm(dim=2).clamp_min(1e-30)
        for head, found in enumerate(change.mean(dim=0).tolist()):
            self.changes.setdefault((layer, head), []).append(found)
        return out


def _attended(
    model: ModelSpec,
    call: AttentionCall,
    math: AttentionMath,
    by_head: Sequence[Tensor],
    seen: Tensor | None = None,
) -> Tensor:
    """Attention of all tokens of a text [token, head, dim], to the keys of a mask if there is one.

    Args:
        model: the model.
        call: the layer's parameters.
        math: its operations on logits.
        by_head: queries, keys and values [head, token, dim].
        seen: [1, 1, query, key]; None: those of the layer.
    """
    q, k, v = (x[None] for x in by_head)
    tokens, device = q.shape[2], q.device
    math = math.at(torch.arange(tokens, device=device), tokens - 1)
    k, v = math.heads(k, v)
    chunk = model.layers[call.layer].chunk
    if seen is None and (call.window is not None or chunk is not None):
        seen = _seen(tokens, call.window, chunk, device)
    out = attend_dense(q, k, v, math=math, seen=seen, causal=seen is None)
    attended = out[0].transpose(0, 1)
    return attended if call.latent is None else call.latent.unfold(attended)


def _seen(tokens: int, window: int | None, chunk: int | None, device: torch.device) -> Tensor:
    position = torch.arange(tokens, device=device)
    behind = position[:, None] - position
    seen = (behind >= 0) & (behind < (window or tokens))
    return (seen & (behind <= position[:, None] % (chunk or tokens)))[None, None]


@torch.inference_mode()
def read_vectors(decoder: Decoder, token_ids: Sequence[int]) -> list[LayerVectors]:
    """Compute the queries, keys and values of a text, layer by layer.

    Args:
        decoder: the model.
        token_ids: tokens of the text; processed in sequences of at most the model's context or
            2,048 tokens.

    Raises:
        ConfigError: the text has too few tokens.
    """
    if len(token_ids) < MIN_TOKENS:
        raise ConfigError(f"expected a text of at least {MIN_TOKENS} tokens, got {len(token_ids)}")
    longest = min(LONGEST_SEQUENCE_TOKENS, decoder.spec.max_positions)
    parts: list[list[tuple[Tensor, ...]]] = []
    for start in range(0, len(token_ids), longest):
        ids = torch.tensor(token_ids[start : start + longest], device=decoder.device)
        positions, listening = (
            torch.arange(len(ids), device=decoder.device),
            _Listening(decoder.spec, OneSequence(len(ids), decoder.device)),
        )
        decoder.forward(ids, positions, positions[-1:], listening)
        parts.append([tuple(x.float().cpu() for x in layer) for layer in listening.heard])
    found = []
    for number, *of_parts in zip(listening.layers, *parts, strict=True):
        query, key, value = (torch.cat(side, dim=1) for side in zip(*of_parts, strict=True))
        found.append(LayerVectors(query, key, value, number))
    return found


@torch.inference_mode()
def retrieval_scores(
    decoder: Decoder, texts: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> list[list[float]]:
    """Measure how much the output of each KV head depends on distant tokens (for `budget=duo`).

    The score of a head is |o - o'| / |o|, mean over the answers' tokens, of the outputs o of its
    query heads, and o' if they see only the first `STREAMING_SINKS` tokens and the newest 1 /
    `STREAMING_PARTS` of the text. One pass for each text.

    Differs from DuoAttention (section 2.3), which trains a gate for each head, all at once, by the
    distance of the last hidden states and an L1 penalty.

    Args:
        decoder: the model.
        texts: token ids of prompts with answers, and the indices of the answers' tokens.

    Returns:
        One row for each layer that evicts, with the scores of its KV heads.

    Raises:
        ConfigError: no layer of the model evicts.
    """
    if not any(layer.stores_all for layer in decoder.spec.layers):
        raise ConfigError("every layer of this model has a sliding window, chunks or a state")
    changes: dict[tuple[int, int], list[float]] = {}
    for token_ids, answers in texts:
        ids = torch.tensor(token_ids, device=decoder.device)
        before = torch.tensor(answers, device=decoder.device) - 1
        states = OneSequence(len(ids), decoder.device)
        listening = _Streaming(decoder.spec, states, before, changes)
        decoder.forward(ids, torch.arange(len(ids), device=decoder.device), before, listening)
    rows: dict[int, list[float]] = {}
    for (layer, _), found in sorted(changes.items()):
        rows.setdefault(layer, []).append(sum(found) / len(found))
    return list(rows.values())


def measure(vectors: Sequence[LayerVectors], form: KVFormat) -> MeasuredConstants:
    """Measure the constants that the codecs of a format need."""
    found: dict[tuple[int, str], Constants] = {}
    for measured in vectors:
        for side, spec in sides_of(form).items():
            numbers = measured.key if side == KEY else measured.value
            first = numbers[:, : int(MEASURED_SHARE * numbers.shape[1])]
            found[measured.layer, side] = make_codec(spec, numbers.shape[2]).measure(first)
    return MeasuredConstants(found)


def errors_of(
    vectors: Sequence[LayerVectors],
    form: KVFormat,
    measured: MeasuredConstants,
    page_tokens: int = 32,
) -> list[LayerError]:
    """Compute the codec error of each layer, on tokens that were not used for constants.

    Args:
        vectors: vectors of the text.
        form: codecs of keys and values.
        measured: constants of the codecs.
        page_tokens: tokens of the pages that some codecs encode as a whole.
    """
    found = []
    for exact in vectors:
        layer = exact.layer
        start = int(MEASURED_SHARE * exact.key.shape[1]) // page_tokens * page_tokens
        pages = (exact.key.shape[1] - start) // page_tokens
        part = slice(start, start + pages * page_tokens)
        query, key, value = (x[:, part] for x in (exact.query, exact.key, exact.value))
        decoded_key = _there_and_back(_codec(form.key, measured, layer, KEY, key), key, page_tokens)
        codec = _codec(form.value, measured, layer, VALUE, value)
        decoded_value = _there_and_back(codec, value, page_tokens)
        wrong = (decoded_value - value).norm() / value.norm()
        if query.shape[2] > key.shape[2]:  # latents are part of the keys
            key = torch.cat([value, key], dim=2)
            decoded_key = torch.cat([decoded_value, decoded_key], dim=2)
        found.append(LayerError(_product_error(query, key, decoded_key), float(wrong)))
    return found


def _codec(
    spec: CodecSpec, measured: MeasuredConstants, layer: int, side: str, vectors: Tensor
) -> Codec:
    codec = make_codec(spec, vectors.shape[2])
    if not spec.constants:
        return codec
    return replace(codec, constants=measured.of(layer, side, vectors.device))


def _there_and_back(codec: Codec, vectors: Tensor, page_tokens: int) -> Tensor:
    heads, _, head_dim = vectors.shape
    by_page = vectors.reshape(heads, -1, page_tokens, head_dim)
    pages = by_page.transpose(0, 1)  # [page, head, token, head_dim]
    decoded = codec.decode(codec.encode(pages))
    return decoded.transpose(0, 1).flatten(1, 2)


def _product_error(query: Tensor, key: Tensor, decoded: Tensor) -> float:
    """Return the relative error of products between the newest queries and all keys."""
    group = len(query) // len(key)
    newest = query[:, -ERROR_QUERIES:]
    newest = newest.reshape(len(key), group * newest.shape[1], -1)
    products, wrong = newest @ key.transpose(1, 2), newest @ (decoded - key).transpose(1, 2)
    varies = products - products.mean(dim=-1, keepdim=True)
    wrong = wrong - wrong.mean(dim=-1, keepdim=True)  # a constant offset changes no weight
    return float((wrong.square().mean() / varies.square().mean()).sqrt())
