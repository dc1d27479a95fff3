"""A decoder for any causal Transformers model: its layers run with the engine's attention.

The flat batch is passed to the model as one row, [1, num_tokens], with explicit positions and no
Transformers cache. Architecture-specific settings (window, softcap, sinks, scale) are passed with
each attention call; see `bridge`. Unsupported architectures are declared in `support`.
"""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from quire.errors import UnsupportedModel
from quire.layout.model import ModelSpec
from quire.layout.statistics import Statistic
from quire.models.base import Batch, PagedAttention
from quire.models.bridge import ATTENTION_NAME, install, register
from quire.models.forward_lock import ForwardLock
from quire.models.hidden_states import LastStates, note_hidden_states
from quire.models.layer_kv import KeysAndValues
from quire.models.layer_major import LayerMajor
from quire.models.layer_source import LayerSource
from quire.models.linear_weights import reorder_linears, widen_linears
from quire.models.native_linear import available_products, fastest_products
from quire.models.observing import Observing
from quire.models.packing import pack_linears
from quire.models.resident_memory import MappedFiles, trim_free_memory
from quire.models.rope import RopeVariants, Rotations
from quire.models.rowwise import make_activations_rowwise, rows_depend
from quire.models.sharding import rank_spec
from quire.models.support import refuse_class, refuse_config


class TransformersDecoder:
    """A Transformers model behind the `Decoder` seam.

    The decoder changes the model permanently: attention and rotary modules are replaced. On a
    CPU, bfloat16 linear layers are packed, and `save_pretrained` would miss their weights. If the
    CPU cannot multiply bfloat16, the layers are stored in float32 instead (see `linear_weights`
    for both). A model belongs to one decoder.
    Forwards of one decoder run one after the other, even if several threads call it. Different
    decoders do not wait for each other.

    Args:
        model: a causal language model on its final device, in its final dtype.
        weights: prefetches the weights of layers that are not on the device; None if all layers
            are on the device.
        codec: of the linear layers' weights: int8 or int4; None: as they are. See `codec_refusal`.
        ranks: number of ranks that share the model; see `sharding`.

    Raises:
        UnsupportedModel: the model's output would be wrong; states the reason and an alternative.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        weights: LayerSource | None = None,
        codec: str | None = None,
        *,
        ranks: int = 1,
    ) -> None:
        refuse_config(model.config)
        refuse_class(type(model))
        register()
        nn.Module.eval(model)
        self._model = model
        self._dtype: torch.dtype = model.dtype
        self._device: torch.device = model.device
        self._spec = rank_spec(ModelSpec.from_config(model.config.to_dict()), ranks)
        self._rope = RopeVariants(model)
        self._bridge = install(model)
        if self._device.type != "meta":  # without data, there is nothing to pack
            prepare_linears(model, () if weights is None else weights.modules, codec)
        self._forward_lock = ForwardLock()
        self._head_takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._use_quire_attention()
        self._weights = weights
        self._last_states: LastStates | None = None
        for number, layer in enumerate(() if weights is None else weights.modules):
            hook = partial(self._begin_layer, number)
            layer.register_forward_pre_hook(hook, prepend=True)  # before it waits for its weights
        self._observing = Observing(model, self._bridge, self._spec, self._probe)

    @property
    def model(self) -> PreTrainedModel:
        """The wrapped Transformers model."""
        return self._model

    @property
    def spec(self) -> ModelSpec:
        """The model's shape, from its config."""
        return self._spec

    @property
    def dtype(self) -> torch.dtype:
        """Type of the weights."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self._device

    @property
    def num_rope_variants(self) -> int:
        """Number of RoPE scaling variants: 1, or 2 for long-RoPE models."""
        return self._rope.count

    def rope_variant(self, final_tokens: int) -> int:
        """See `Decoder.rope_variant`."""
        return self._rope.variant(final_tokens)

    def prepare(self, statistic: Statistic) -> str | None:
        """See `Decoder.prepare`."""
        return self._observing.prepare(statistic)

    def prepare_pre_rope(self) -> str | None:
        """See `Decoder.prepare_pre_rope`."""
        return self._observing.prepare_pre_rope()

    def prepare_hidden_states(self) -> str | None:
        """See `HiddenStates`."""
        if self._last_states is None:
            self._last_states, why_not = LastStates.of(self._model, self._probe)
            return why_not
        return None

    def prepare_fixed_shapes(self, rows: int) -> str | None:
        """See `FixedShapes.prepare_fixed_shapes`."""
        with self._forward_lock.held():
            make_activations_rowwise(self._model)
            return rows_depend(self, rows)

    def prepare_recomputation(self) -> str | None:
        """Prepare to recompute keys and values, and to pass each layer's attention its input.

        Returns:
            The reason why this model cannot recompute them, or None if it can.
        """
        with self._forward_lock.held():
            why_not = self._observing.prepare_recomputation(self._weights)
            if why_not is None:
                self._observing.watch_inputs()
        return why_not

    def keys_and_values(
        self,
        layer: int,
        inputs: Float[Tensor, "token hidden"],
        positions: Int[Tensor, " token"],
        *,
        rope_variant: int = 0,
    ) -> KeysAndValues:
        """See `LayerKV.keys_and_values`; after `prepare_recomputation`."""
        layer_kv = self._observing.recomputation
        with self._frequencies(rope_variant), torch.inference_mode():
            return layer_kv.keys_and_values(layer, inputs, positions)

    def first_layer(
        self,
        token_ids: Int[Tensor, " token"],
        positions: Int[Tensor, " token"],
        *,
        rope_variant: int = 0,
    ) -> KeysAndValues:
        """See `LayerKV.first_layer`; after `prepare_recomputation`."""
        layer_kv = self._observing.recomputation
        with self._frequencies(rope_variant), torch.inference_mode():
            return layer_kv.first_layer(token_ids, positions)

    def arrive_kv(self, layer: int) -> None:
        """Wait for the weights of a layer that `keys_and_values` reads."""
        self._observing.recomputation.arrive(layer)

    def _begin_layer(self, number: int, module: nn.Module, args: tuple[object, ...]) -> None:
        """Tell the attention of the forward that a layer begins; its weights may be in transfer."""
        begin = getattr(self._bridge.attention, "begin_layer", None)
        if begin is not None:
            begin(number)

    def rotations(self, rope_variant: int = 0) -> Rotations | None:
        """See `Decoder.rotations`."""
        return self._observing.rotations(lambda: self._frequencies(rope_variant))

    @contextmanager
    def _frequencies(self, rope_variant: int) -> Iterator[None]:
        """Select these RoPE frequencies outside of a forward, under the forward lock."""
        with self._forward_lock.held():
            self._rope.select(rope_variant)
            yield

    def _probe(self, positions: Sequence[int], attention: PagedAttention) -> None:
        """Run the model on one token at each of these positions, without computing logits."""
        places = torch.tensor(positions, device=self._device)
        token = torch.full_like(places, self._spec.vocab_size // 2)
        with self._forward_lock.held():
            self._rope.select(0)
            with self._bridge.attending(attention):
                self._module_logits(Batch(token, places, places[:0], attention))

    def forward(
        self,
        token_ids: Int[Tensor, " num_tokens"],
        positions: Int[Tensor, " num_tokens"],
        sample_rows: Int[Tensor, " num_samples"],
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        """See `Decoder.forward`."""
        batch = Batch(token_ids, positions, sample_rows, attention)
        with self._forward_lock.held():
            self._rope.select(rope_variant)
            with self._bridge.attending(attention):
                return self._logits(batch)

    def forward_together(
        self, batches: Sequence[Batch], *, rope_variant: int = 0
    ) -> list[Float[Tensor, "num_samples vocab"]]:
        """See `LayerByLayer`."""
        assert self._weights is not None, "only called if weights are offloaded"

        def enter(number: int) -> None:
            self._bridge.switch(batches[number].attention)

        with self._forward_lock.held(), self._weights.shared_by(len(batches)):
            self._rope.select(rope_variant)
            with self._bridge.attending(None):
                return self._layer_major.run([partial(self._logits, b) for b in batches], enter)

    @cached_property
    def _layer_major(self) -> LayerMajor:
        assert self._weights is not None, "checked by forward_together"
        return LayerMajor(self._weights.modules, self._device)

    def _logits(self, batch: Batch) -> Tensor:
        return self._module_logits(batch)

    @torch.inference_mode()
    def _module_logits(self, batch: Batch) -> Tensor:
        """Run the modules of the Transformers model."""
        head = {"logits_to_keep": batch.sample_rows} if self._head_takes_rows else {}
        output = self._model(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=False,
            return_dict=True,
            **head,
        )
        if self._last_states is not None:
            note_hidden_states(batch.attention, self._last_states.take())
        logits: Tensor = output.logits[0]
        return logits if self._head_takes_rows else logits[batch.sample_rows]

    def reference_logits(
        self, token_ids: Int[Tensor, " num_tokens"]
    ) -> Float[Tensor, "num_tokens vocab"]:
        """Logits of one sequence, computed with Transformers' own eager attention and masks."""
        with self._forward_lock.held(), torch.inference_mode():
            self._rope.select(0)
            self._model.set_attn_implementation("eager")
            try:
                output = self._model(token_ids.unsqueeze(0), use_cache=False, return_dict=True)
            finally:
                self._use_quire_attention()
        logits: Tensor = output.logits[0]
        return logits

    def _use_quire_attention(self) -> None:
        self._model.set_attn_implementation(ATTENTION_NAME)
        in_use = self._model.config._attn_implementation
        if in_use != ATTENTION_NAME:
            raise UnsupportedModel(
                f"{type(self._model).__name__} uses attention {in_use!r} and does not support "
                "Transformers' attention interface; run it with Transformers itself"
            )


def prepare_linears(
    model: nn.Module, left_alone: Sequence[nn.Module], codec: str | None = None
) -> None:
    """Replace the linear layers of a model on a CPU by the fastest ones for this CPU.

    Without layers left alone, the other weights are copied, so that no weight file stays mapped.

    Args:
        model: on its final device.
        left_alone: modules whose layers are not replaced.
        codec: of the weights: int8 or int4; None: as they are.
    """
    products = fastest_products() if codec is None else available_products()
    if products is not None:
        pack_linears(model, products, left_alone, codec)
    else:
        reorder_linears(model, left_alone)
    widen_linears(model)
    if not left_alone:
        MappedFiles().copy_weights(model)
        trim_free_memory()
