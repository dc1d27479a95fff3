"""Buffers of the native decoder, and the calls of each layer on them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from quire.kernels.chains import HeadBuffers
from quire.kernels.native.chain import Chain, LayerChain, PartTimes, RowArgs
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.linear import CODED, CodedRows, Products, set_input, set_output
from quire.kernels.native.linear_args import LinearArgs, NormArgs, RopeArgs
from quire.kernels.native.row_functions import HeadShape, RowFunctions, empty_heads, set_heads
from quire.models.native.layers import FusedLayer, FusedModel, FusedProduct, Norm

NORMS = "norms and RoPE"  # among CHAIN_PARTS


@dataclass(frozen=True, slots=True, eq=False)
class LayerCalls:
    """The calls of one layer.

    Attributes:
        before: from the residual stream to queries, keys and values.
        after: from attention's output to the residual stream of the next layer: `output`, `mlp`.
        output, mlp: the two parts of `after`.
        rope: the call that writes queries, keys and values.
        attended: conversion or quantization of attention's output, or its product.
        heads: layout of queries, keys and values.
        scale: factor on query-key products.
    """

    before: Chain
    after: Chain
    output: Chain
    mlp: Chain
    rope: RopeArgs
    attended: RowArgs
    heads: HeadShape
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class HeadCalls:
    """The calls of the output head.

    Attributes:
        capacity: rows of the buffers.
        norm: the last norm.
        product: the head's product, the last of `chain`.
        chain: all calls.
        buffers: the memory that the arguments point to.
    """

    capacity: int
    norm: NormArgs
    product: LinearArgs
    chain: Chain
    buffers: tuple[Tensor, CodedRows | None]


class Workspace:
    """Memory for the activations of one batch, reused by every layer and step.

    Args:
        model: the fused layers.
        library: the loaded C library.
        products: multiplies.
        dtype: of queries, keys and values.
    """

    def __init__(
        self, model: FusedModel, library: NativeLibrary, products: Products, dtype: torch.dtype
    ) -> None:
        self._model, self._library, self._products = model, library, products
        self._functions = RowFunctions(library.path)
        self._dtype = dtype
        self._input_dtype = products.activation_dtype(model.layers[0].qkv.weight, dtype)
        self._head_dtype = products.activation_dtype(model.head.weight, dtype)
        self._rows = self._capacity = 0
        self._chained = False  # whether the calls' queries, keys, values and output are `heads`
        self._times: PartTimes | None = None
        self.layers: tuple[LayerCalls, ...] = ()
        self._head: HeadCalls | None = None

    def time_parts(self) -> PartTimes:
        """Time the calls of all following batches; return the times."""
        self._times = PartTimes()
        return self._times

    def set_rows(self, rows: int) -> None:
        """Set the number of rows of the next calls; allocates if they exceed all before."""
        if rows > self._capacity:
            self._allocate(rows)
        if rows != self._rows:
            for layer in self.layers:
                for chain in (layer.before, layer.after):
                    chain.set_rows(rows)
            self.stream, self.normed = self._stream[:rows], self._normed[:rows]
            self.heads = HeadBuffers(*(buffer[:rows] for buffer in self._heads))
            self._numbers = torch.arange(rows)
            self._rows = rows

    def set_turns(self, cosine: Tensor, sine: Tensor) -> None:
        """Set cosines and sines [row, rotary_dim] of the batch's positions."""
        self._turns = cosine.float().contiguous(), sine.float().contiguous()
        addresses = [turn.data_ptr() for turn in self._turns]
        for layer in self.layers:
            layer.rope.cosine, layer.rope.sine = addresses

    # ---- all layers ----------------------------------------------------------------------------

    def run_layers(self, attention: Sequence[object]) -> None:
        """Run all layers in one chain, with attention on `heads`."""
        if not self._chained:
            for layer in self.layers:
                set_heads(layer.rope, self._heads[:3])
                layer.attended.x = self._heads[3].data_ptr()
            self._chained = True
        self._chain.run(attention, self._times)

    # ---- one layer -----------------------------------------------------------------------------

    def run_before(self, layer: LayerCalls) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values."""
        heads = empty_heads(self._rows, layer.heads, self._dtype)
        set_heads(layer.rope, heads)
        self._chained = False
        layer.before.run(self._times)
        return heads

    def run_after(self, layer: LayerCalls, attended: Tensor) -> None:
        """Add attention and the MLP to the residual stream."""
        layer.attended.x = attended.data_ptr()
        layer.after.run(self._times)

    def run_output(self, layer: LayerCalls, attended: Tensor) -> None:
        """Add attention to the residual stream."""
        layer.attended.x = attended.data_ptr()
        layer.output.run(self._times)

    def run_mlp(self, layer: LayerCalls) -> None:
        """Add the MLP to the residual stream."""
        layer.mlp.run(self._times)

    # ---- head ----------------------------------------------------------------------------------

    def logits(self, sample_rows: Tensor) -> Tensor:
        """Apply the last norm and the output head to these rows; float32."""
        rows = sample_rows.shape[0]
        logits = torch.empty(rows, self._model.head.weight.outer)
        if not rows:
            return logits
        if self._head is None or rows > self._head.capacity:
            self._head = self._make_head(rows)
        sampled = self.stream if self._are_all(sample_rows) else self.stream[sample_rows]
        head = self._head
        head.norm.x, head.norm.x_row = sampled.data_ptr(), sampled.stride(0)
        set_output(head.product, logits)
        head.chain.set_rows(rows)
        head.chain.run(self._times)
        return logits

    def normed_rows(self, rows: Tensor) -> Tensor:
        """Apply the last norm to these rows of the residual stream; float32."""
        norm, stream = self._model.norm, self.stream[rows]
        return F.rms_norm(stream, stream.shape[1:], norm.weight.float(), norm.eps)

    def _are_all(self, sample_rows: Tensor) -> bool:
        """Whether these are all rows in order, as in a step without prompts."""
        return len(sample_rows) == self._rows and torch.equal(sample_rows, self._numbers)

    def _make_head(self, rows: int) -> HeadCalls:
        norm, head = self._model.norm, self._model.head
        normed = torch.empty(rows, self._stream.shape[1], dtype=self._head_dtype)
        coded = CodedRows.empty(*normed.shape) if head.weight.kind in CODED else None
        first = self._functions.norm(self._stream[:0], norm.weight, norm.eps, normed)
        product = self._product(head, normed, coded)
        last = product[-1]
        assert isinstance(last, LinearArgs)
        chain = Chain(self._library, (NORMS, [first]), ("head", product))
        return HeadCalls(rows, first, last, chain, (normed, coded))

    # ---- memory --------------------------------------------------------------------------------

    def _allocate(self, rows: int) -> None:
        first = self._model.layers[0]
        hidden = first.output.weight.outer
        self._stream = torch.empty(rows, hidden)
        self._normed = torch.empty(rows, hidden, dtype=self._input_dtype)
        self._joint = torch.empty(rows, first.qkv.weight.outer)
        width = first.gate_up.weight.outer // 2
        self._gated = torch.empty(rows, width, dtype=self._input_dtype)
        query, key, value = empty_heads(rows, first.heads, self._dtype)
        self._heads = query, key, value, torch.zeros_like(query)  # rows of padding are read
        self._converted = torch.empty(rows, first.output.weight.inner, dtype=self._input_dtype)
        self._codes: dict[int, CodedRows] = {}
        self._capacity, self._rows, self._chained = rows, 0, False
        self.layers = tuple(map(self._calls, self._model.layers))
        pairs = [(layer.before, layer.after) for layer in self.layers]
        self._chain = LayerChain(self._library, pairs)

    @property
    def _is_coded(self) -> bool:
        return self._model.layers[0].qkv.weight.kind in CODED

    def _calls(self, layer: FusedLayer) -> LayerCalls:
        """Build the calls of a layer on the buffers."""
        rope = self._functions.heads(self._joint, layer.heads, self._dtype)
        qkv = self._layer_product(layer.qkv, self._normed, self._joint)
        output = self._output(layer)
        mlp = [
            *self._layer_product(layer.gate_up, self._normed, self._gated),
            *self._layer_product(layer.down, self._gated, self._stream),
        ]
        library, attention_norm = self._library, (NORMS, [self._norm(layer.attention_norm)])
        output_part = ("output projection", output)
        mlp_parts = ((NORMS, [self._norm(layer.mlp_norm)]), ("mlp", mlp))
        return LayerCalls(
            before=Chain(library, attention_norm, ("qkv", qkv), (NORMS, [rope])),
            after=Chain(library, output_part, *mlp_parts),
            output=Chain(library, output_part),
            mlp=Chain(library, *mlp_parts),
            rope=rope,
            attended=output[0],
            heads=layer.heads,
            scale=layer.scale,
        )

    def _output(self, layer: FusedLayer) -> list[RowArgs]:
        """Arguments of attention's output projection, and of the conversion of its input."""
        attended = self._heads[3].flatten(1)
        if self._is_coded or attended.dtype == self._input_dtype:
            return self._layer_product(layer.output, attended, self._stream)
        convert = self._functions.convert(attended, self._converted)
        return [convert, *self._layer_product(layer.output, self._converted, self._stream)]

    def _norm(self, norm: Norm) -> RowArgs:
        return self._functions.norm(self._stream, norm.weight, norm.eps, self._normed)

    def _layer_product(self, product: FusedProduct, x: Tensor, out: Tensor) -> list[RowArgs]:
        width = x.shape[1]
        if width not in self._codes and product.weight.kind in CODED:
            self._codes[width] = CodedRows.empty(*x.shape)
        calls = self._product(product, x, self._codes.get(width))
        last = calls[-1]
        assert isinstance(last, LinearArgs)
        set_output(last, out)
        return calls

    def _product(self, product: FusedProduct, x: Tensor, coded: CodedRows | None) -> list[RowArgs]:
        """Arguments of a product; for a coded weight, of the quantization of x before it."""
        args = self._products.linear_args(product.weight, bias=product.bias, finish=product.finish)
        if product.weight.kind not in CODED:
            set_input(args, x)
            return [args]
        assert coded is not None, "codes of x are written to this buffer"
        set_input(args, coded)
        return [self._products.code_args(x, coded), args]
