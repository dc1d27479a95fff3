"""Buffers of the native decoder, and the calls of each layer on them."""

from dataclasses import dataclass

import torch
from torch import Tensor

from quire.kernels.native.chain import Chain, ChainArgs, PartTimes
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.linear import CODED, CodedRows, Products, set_input, set_output
from quire.kernels.native.linear_args import LinearArgs, RopeArgs
from quire.kernels.native.row_functions import HeadShape, RowFunctions, set_heads
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
        attended: quantization of attention's output, or its product.
        heads: layout of queries, keys and values.
        scale: factor on query-key products.
    """

    before: Chain
    after: Chain
    output: Chain
    mlp: Chain
    rope: RopeArgs
    attended: ChainArgs
    heads: HeadShape
    scale: float


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
        self._times: PartTimes | None = None
        self.layers: tuple[LayerCalls, ...] = ()

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
            self._rows = rows
        self.stream, self.normed = self._stream[:rows], self._normed[:rows]

    def set_turns(self, cosine: Tensor, sine: Tensor) -> None:
        """Set cosines and sines [row, rotary_dim] of the batch's positions."""
        self._turns = cosine.float().contiguous(), sine.float().contiguous()
        addresses = [turn.data_ptr() for turn in self._turns]
        for layer in self.layers:
            layer.rope.cosine, layer.rope.sine = addresses

    def run_before(self, layer: LayerCalls) -> tuple[Tensor, Tensor, Tensor]:
        """Compute queries, keys and values."""
        heads = set_heads(layer.rope, self._rows, layer.heads, self._dtype)
        layer.before.run(self._times)
        return heads

    def run_after(self, layer: LayerCalls, attended: Tensor) -> None:
        """Add attention and the MLP to the residual stream."""
        held = self._set_attended(layer, attended)
        layer.after.run(self._times)
        del held

    def run_output(self, layer: LayerCalls, attended: Tensor) -> None:
        """Add attention to the residual stream."""
        held = self._set_attended(layer, attended)
        layer.output.run(self._times)
        del held

    def run_mlp(self, layer: LayerCalls) -> None:
        """Add the MLP to the residual stream."""
        layer.mlp.run(self._times)

    def logits(self, sample_rows: Tensor) -> Tensor:
        """Apply the last norm and the output head to these rows; float32."""
        sampled = self.stream[sample_rows]
        normed = torch.empty(sampled.shape, dtype=self._head_dtype)
        norm, head = self._model.norm, self._model.head
        logits = torch.empty(sampled.shape[0], head.weight.outer)
        args = self._product(head, normed, logits, sampled.shape[0])
        normalise = self._functions.norm(sampled, norm.weight, norm.eps, normed)
        Chain(self._library, (NORMS, [normalise]), ("head", args)).run(self._times)
        return logits

    def _set_attended(self, layer: LayerCalls, attended: Tensor) -> Tensor:
        rows = attended.reshape(self._rows, -1)
        if isinstance(layer.attended, LinearArgs):
            rows = rows.to(self._input_dtype)
        layer.attended.x = rows.data_ptr()
        return rows

    def _allocate(self, rows: int) -> None:
        first = self._model.layers[0]
        hidden = first.output.weight.outer
        self._stream = torch.empty(rows, hidden)
        self._normed = torch.empty(rows, hidden, dtype=self._input_dtype)
        self._joint = torch.empty(rows, first.qkv.weight.outer)
        width = first.gate_up.weight.outer // 2
        self._gated = torch.empty(rows, width, dtype=self._input_dtype)
        self._attended = torch.empty(rows, first.output.weight.inner, dtype=self._dtype)
        widths = {hidden, width, first.output.weight.inner}
        self._codes = {each: CodedRows.empty(rows, each) for each in widths if self._is_coded}
        self._capacity, self._rows = rows, 0
        self.layers = tuple(map(self._calls, self._model.layers))

    @property
    def _is_coded(self) -> bool:
        return self._model.layers[0].qkv.weight.kind in CODED

    def _calls(self, layer: FusedLayer) -> LayerCalls:
        """Build the calls of a layer on the buffers."""
        rope = self._functions.heads(self._joint, layer.heads, self._dtype)
        qkv = self._product(layer.qkv, self._normed, self._joint)
        attended = self._attended if self._is_coded else self._attended.to(self._input_dtype)
        output = self._product(layer.output, attended, self._stream)
        mlp = [
            *self._product(layer.gate_up, self._normed, self._gated),
            *self._product(layer.down, self._gated, self._stream),
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

    def _norm(self, norm: Norm) -> ChainArgs:
        return self._functions.norm(self._stream, norm.weight, norm.eps, self._normed)

    def _product(
        self, product: FusedProduct, x: Tensor, out: Tensor, rows: int = 0
    ) -> list[ChainArgs]:
        """Arguments of a product; for a coded weight, of the quantization of x before it."""
        args = self._products.linear_args(product.weight, bias=product.bias, finish=product.finish)
        set_output(args, out)
        args.rows = rows
        if product.weight.kind not in CODED:
            set_input(args, x)
            return [args]
        coded = self._codes[x.shape[1]] if rows == 0 else CodedRows.empty(*x.shape)
        self._last_codes = coded  # the arguments hold addresses only
        set_input(args, coded)
        return [self._products.code_args(x, coded), args]
