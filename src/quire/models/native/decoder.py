"""The native decoder: a Llama-like model whose layers are one chain of calls of the C library.

Before attention: RMSNorm, one product for queries, keys and values, RoPE. After attention: the
output projection added to the residual stream, RMSNorm, one gated product, and the down projection
added to the residual stream. The residual stream is float32; Transformers rounds it to the model's
type after every operation. Buffers are allocated once for the largest batch.

Python runs between the layers only if attention needs more than the C library computes, such as
statistics of tokens or offloaded pages.
"""

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from quire.errors import UnsupportedModel
from quire.kernels.backend import AttentionMath, HeadBuffers
from quire.kernels.native.arguments import LinearArgs, NormArgs, RopeArgs
from quire.kernels.native.chain import (
    Chain,
    HeadShape,
    LayerChain,
    PartTimes,
    RowArgs,
    RowFunctions,
    empty_heads,
    set_heads,
)
from quire.kernels.native.library import NativeLibrary
from quire.kernels.native.linear import CODED, CodedRows, Products, set_input, set_output
from quire.layout.statistics import ResidualSimilarity, Statistic
from quire.models.adapter import TransformersDecoder, in_turn
from quire.models.base import AttentionCall, Batch, ChainedAttention
from quire.models.hidden_states import note_hidden_states
from quire.models.native.layers import FusedLayer, FusedModel, FusedProduct, Norm, fuse, refusal

FIRST_POSITIONS = 1024  # positions of the first table
MAX_POSITIONS = 32768  # positions of the largest table; those beyond are computed in every step


class RopeTable:
    """Rows of cosines and sines of a rotary module.

    The module takes some fifteen operations for each batch. Its result depends on the position
    alone while its frequencies are the same, so it is stored. The table grows with the largest
    position.
    """

    def __init__(self, rotary: nn.Module) -> None:
        self._rotary: Any = rotary
        self._tables: dict[int, tuple[Tensor, Tensor, Tensor]] = {}  # by id of the frequencies

    def at(
        self, positions: Int[Tensor, " row"]
    ) -> tuple[Float[Tensor, "row rotary_dim"], Float[Tensor, "row rotary_dim"]]:
        """Return cosines and sines of positions, float32."""
        needed = int(positions.max()) + 1
        if needed > MAX_POSITIONS:
            return self._computed(positions)
        frequencies = self._rotary.inv_freq
        _, cosine, sine = self._tables.get(id(frequencies), (None, None, None))
        if cosine is None or sine is None or len(cosine) < needed:
            size = max(FIRST_POSITIONS, 1 << (needed - 1).bit_length())
            cosine, sine = self._computed(torch.arange(size))
            self._tables[id(frequencies)] = frequencies, cosine, sine  # the id stays in use
        return cosine.index_select(0, positions), sine.index_select(0, positions)

    def _computed(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        cosine, sine = self._rotary(torch.empty(1), positions[None])
        return cosine[0].float().contiguous(), sine[0].float().contiguous()


NORMS = "norms and RoPE"  # among CHAIN_PARTS


@dataclass(frozen=True, slots=True, eq=False)
class LayerCalls:
    """The calls of one layer."""

    before: Chain  # from the residual stream to queries, keys and values
    after: Chain  # from attention's output to the next layer's residual stream: `output`, `mlp`
    output: Chain
    mlp: Chain
    rope: RopeArgs  # writes queries, keys and values
    attended: RowArgs  # conversion or quantization of attention's output, or its product
    heads: HeadShape  # layout of queries, keys and values
    scale: float  # factor on query-key products


@dataclass(frozen=True, slots=True, eq=False)
class HeadCalls:
    """The calls of the output head."""

    capacity: int  # rows of the buffers
    norm: NormArgs  # the last one
    product: LinearArgs  # the last of `chain`
    chain: Chain
    buffers: tuple[Tensor, CodedRows | None]  # the memory that the arguments point to


class Workspace:
    """Memory for the activations of one batch, reused by every layer and step."""

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
        layer.attended.x = attended.data_ptr()
        layer.after.run(self._times)

    def run_output(self, layer: LayerCalls, attended: Tensor) -> None:
        layer.attended.x = attended.data_ptr()
        layer.output.run(self._times)

    def run_mlp(self, layer: LayerCalls) -> None:
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


class NativeDecoder(TransformersDecoder):
    """A decoder with fused layers; equal to `TransformersDecoder` up to rounding.

    Raises:
        UnsupportedModel: the model cannot be fused; states the reason.
    """

    def __init__(
        self, model: PreTrainedModel, library: NativeLibrary, kind: str | None = None
    ) -> None:
        reason = refusal(model)
        if reason is not None:
            raise UnsupportedModel(f"{reason}; load it with model_impl=transformers")
        products = Products(library)
        self._fused: FusedModel = fuse(model, products, kind)
        self._workspace = Workspace(self._fused, library, products, model.dtype)
        self._math = [AttentionMath(layer.scale) for layer in self._fused.layers]
        self._rope_table = RopeTable(self._fused.rotary)
        super().__init__(model)

    def prepare(self, statistic: Statistic) -> str | None:
        return None if isinstance(statistic, ResidualSimilarity) else super().prepare(statistic)

    def prepare_hidden_states(self) -> str | None:
        return None

    def time_parts(self) -> PartTimes:
        """Time the C calls of all following forwards by component; return the times."""
        return self._workspace.time_parts()

    @torch.inference_mode()
    def _logits(self, batch: Batch) -> Tensor:
        workspace, rows = self._workspace, batch.token_ids.shape[0]
        if rows == 0:
            return torch.empty(0, self._fused.head.weight.outer)
        workspace.set_rows(rows)
        workspace.stream.copy_(self._fused.embedding(batch.token_ids))
        workspace.set_turns(*self._rope_table.at(batch.positions))
        self._run_layers(batch.attention)
        note_hidden_states(batch.attention, workspace.normed_rows)
        return workspace.logits(batch.sample_rows)

    def prepare_by_layer(self) -> str | None:
        return None

    @torch.inference_mode()
    def _together(self, batches: Sequence[Batch]) -> list[Tensor]:
        return in_turn([self._by_layer(batch) for batch in batches])

    def _by_layer(self, batch: Batch) -> Generator[None, None, Tensor]:
        """Run a batch that shares the workspace with others; its residual stream is kept here."""
        workspace, stream = self._workspace, self._fused.embedding(batch.token_ids).float()
        turns = self._rope_table.at(batch.positions)
        for number in range(len(self._fused.layers)):
            yield
            workspace.set_rows(len(stream))
            workspace.stream.copy_(stream)
            workspace.set_turns(*turns)
            self._run_layer(number, workspace.layers[number], batch.attention)
            stream.copy_(workspace.stream)
        note_hidden_states(batch.attention, workspace.normed_rows)
        return workspace.logits(batch.sample_rows)

    def _run_layers(self, attention: Any) -> None:
        workspace = self._workspace
        chained = None
        if isinstance(attention, ChainedAttention):
            chained = attention.chain(self._math, workspace.heads)
        if chained is not None:
            workspace.run_layers(chained)
            return
        for number, layer in enumerate(workspace.layers):
            self._run_layer(number, layer, attention)

    def _run_layer(self, number: int, layer: LayerCalls, attention: Any) -> None:
        workspace = self._workspace
        query, key, value = workspace.run_before(layer)
        if getattr(attention, "wants_inputs", False):
            attention.note_input(number, workspace.normed.to(self.dtype, copy=True))
        call = AttentionCall(
            layer=number,
            scale=layer.scale,
            window=self.spec.layers[number].window,
            softcap=None,
            sinks=None,
            rotary=self._bridge.rotaries.get(number),
        )
        attended = attention.attend(call, query, key, value).contiguous()
        if not getattr(attention, "wants_residual_similarity", False):
            workspace.run_after(layer, attended)
            return
        before = workspace.stream.clone()
        workspace.run_output(layer, attended)
        similarity = F.cosine_similarity(before, workspace.stream, dim=-1)
        attention.note_residual_similarity(number, similarity)
        workspace.run_mlp(layer)
