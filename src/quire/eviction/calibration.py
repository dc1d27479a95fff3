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
STREAMING_SINKS, STREAMING_PARTS = 4, 8  # a streaming head sees 4 sinks and 1 / 8 of a text


@dataclass(frozen=True, slots=True)
class LayerVectors:
    """Queries, keys and values of a layer for the tokens of a text, float32 in CPU memory.

    Attributes:
        query: [num_heads, token, head_dim], after RoPE; folded if values are latents.
        key: [num_kv_heads, token, head_dim], after RoPE.
        value: [num_kv_heads, token, value_dim].
        layer: its number in the model.
        math: its operations on logits.
    """

    query: Float[Tensor, "head token head_dim"]
    key: Float[Tensor, "kv_head token head_dim"]
    value: Float[Tensor, "kv_head token value_dim"]
    layer: int
    math: AttentionMath


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
    layers: list[tuple[int, AttentionMath]] = field(default_factory=list)
    heard: list[tuple[Tensor, Tensor, Tensor]] = field(default_factory=list)

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        math, query = folded(call.math, query)
        by_head = [x.transpose(0, 1) for x in (query, key, value)]
        self.layers.append((call.layer, math))
        self.heard.append((by_head[0], by_head[1], by_head[2]))
        positions = torch.arange(len(query), device=query.device)
        math = math.at(positions, len(query) - 1)
        q, k, v = (x[None] for x in by_head)
        k, v = math.heads(k, v)
        chunk = self.model.layers[call.layer].chunk
        seen = None
        if call.window is not None or chunk is not None:
            seen = _seen(len(query), call.window, chunk, query.device)
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
    for (number, math), *of_parts in zip(listening.layers, *parts, strict=True):
        query, key, value = (torch.cat(side, dim=1) for side in zip(*of_parts, strict=True))
        found.append(LayerVectors(query, key, value, number, math))
    return found


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
        texts: token ids of prompts with answers, and the indices of the answers' tokens; at most
            `LONGEST_SEQUENCE_TOKENS` each.

    Returns:
        One row for each layer that evicts, with the scores of its KV heads.

    Raises:
        ConfigError: no layer of the model evicts.
    """
    changes: dict[int, list[Tensor]] = {}
    for token_ids, answers in texts:
        before = torch.tensor(answers, device=decoder.device) - 1
        for vectors in read_vectors(decoder, token_ids):
            source = decoder.spec.layers[vectors.layer].source
            layer = vectors.layer if source is None else source
            if decoder.spec.layers[layer].stores_all:
                changes.setdefault(layer, []).append(_change_of_streaming(vectors, before))
    if not changes:
        raise ConfigError("every layer of this model has a sliding window, chunks or a state")
    return [torch.stack(found).mean(dim=0).tolist() for _, found in sorted(changes.items())]


def _change_of_streaming(vectors: LayerVectors, rows: Tensor) -> Float[Tensor, " kv_head"]:
    """Relative change of the output of some queries if they see sinks and recent tokens only."""
    q, k, v = (x.to(rows.device)[None] for x in (vectors.query, vectors.key, vectors.value))
    position = torch.arange(k.shape[2], device=rows.device)
    behind = rows[:, None] - position
    near = (behind < max(1, len(position) // STREAMING_PARTS)) | (position < STREAMING_SINKS)
    math = vectors.math.at(position, len(position) - 1)
    k, v = math.heads(k, v)
    exact, other = (
        attend_dense(q[:, :, rows], k, v, math=math, seen=(seen & (behind >= 0))[None, None])
        .view(len(vectors.key), -1, len(rows), v.shape[3])
        .double()
        for seen in (behind >= 0, near)
    )
    change: Tensor = (exact - other).norm(dim=(1, 3)) / exact.norm(dim=(1, 3)).clamp_min(1e-30)
    return change.mean(dim=1)


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
