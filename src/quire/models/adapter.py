"""A decoder for any causal Transformers model: its layers run with the engine's attention.

The flat batch is passed to the model as one row, [1, num_tokens], with explicit positions and no
Transformers cache. Architecture-specific settings (window, softcap, sinks, scale) are passed with
each attention call; see `bridge`. Unsupported architectures are declared in `support`.

Forwards of a fixed number of rows, in which a row's result depends on no other row or index.

Forwards of equal shape run the same kernels with the same splits, independent of their contents.
In a matrix product every row is then summed in the same order. Elementwise functions are the
exception: torch splits a tensor into equal parts for its threads. It computes most of a part with
vector instructions and the last few elements without, and the two can round exp, tanh and erf
differently. Activations are therefore computed in groups of whole rows that one thread computes.

Run several forwards of one model layer by layer: each layer for all forwards, then the next.

    row by row           a: 0 1 2 3   b: 0 1 2 3        every layer is prefetched twice
    column by column     a0 b0  a1 b1  a2 b2  a3 b3     every layer is prefetched once

Each forward is the model's own and runs on its own thread. Only one thread runs at a time: at the
start of a layer, a forward yields to the next forward. A waiting forward holds its hidden
states only; all other activations in memory are those of one forward.
"""

import contextvars
import inspect
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.activations import ACT2CLS

from quire.errors import UnsupportedModel
from quire.layout.model import ModelSpec
from quire.layout.statistics import Statistic
from quire.models.base import (
    AttentionCall,
    Batch,
    Decoder,
    OwnValue,
    PagedAttention,
    TokenByToken,
)
from quire.models.bridge import ATTENTION_NAME, install, register
from quire.models.hidden_states import LastStates, note_hidden_states
from quire.models.layer_source import LayerSource, decoder_layers
from quire.models.linear_weights import reorder_linears, widen_linears
from quire.models.native_linear import available_products, fastest_products
from quire.models.observing import KeysAndValues, Observing, OutputProjections
from quire.models.own_attention import (
    has_own_attention,
    model_inputs,
    read_projections,
    reference_attention,
)
from quire.models.packing import MappedFiles, pack_linears, trim_free_memory
from quire.models.recurrent import why_not_by_token
from quire.models.rope import RopeVariants, Rotations
from quire.models.sharding import rank_spec
from quire.models.support import refuse_class, refuse_config
from quire.plan.weights import MAX_CHUNKS


class ForwardLock:
    """Held by one context: a thread, and the threads that run its forwards layer by layer.

    A thread lock alone would not do: forwards that run layer by layer have threads of their own,
    in copies of the context of the thread that holds the lock, and recompute inside attention.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_held: ContextVar[bool] = ContextVar("quire-forward-lock", default=False)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock within the block; a context that holds it already goes on at once."""
        if self._is_held.get():
            yield
            return
        with self._lock:
            token = self._is_held.set(True)
            try:
                yield
            finally:
                self._is_held.reset(token)


ONE_THREAD_NUMBERS = 16_384  # up to this size torch runs elementwise functions on one thread
VECTOR_NUMBERS = 64  # a multiple of torch's vector width on any CPU
_SEED = 20


def _class_of(entry: object) -> type:
    found = entry[0] if isinstance(entry, tuple) else entry  # with or without arguments
    assert isinstance(found, type), "ACT2CLS contains classes"
    return found


_CLASSES = tuple({_class_of(entry) for entry in ACT2CLS.values()})


class RowwiseActivation(nn.Module):
    """An activation whose result for a row does not depend on the row's index."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.activation = activation

    def forward(self, numbers: Float[Tensor, "*rows width"]) -> Float[Tensor, "*rows width"]:
        width = numbers.shape[-1]
        together = 1 if width % VECTOR_NUMBERS else max(1, ONE_THREAD_NUMBERS // width)
        rows = numbers.reshape(-1, width)
        parts = [self.activation(part) for part in torch.split(rows, together)]
        return torch.cat(parts).view(numbers.shape)


def make_activations_rowwise(model: nn.Module) -> None:
    """Wrap every activation of a model; idempotent."""
    for parent in list(model.modules()):
        if isinstance(parent, (RowwiseActivation, *_CLASSES)):
            continue
        for name, child in list(parent._modules.items()):
            if child is not None and isinstance(child, _CLASSES):
                setattr(parent, name, RowwiseActivation(child))


@dataclass(frozen=True, slots=True)
class _DrawnStates:
    """States of sequences of one token each.

    Attributes:
        spec: of the model.
        order: number of each sequence; its states depend on nothing else.
    """

    spec: ModelSpec
    order: Tensor
    length = 1

    @property
    def tokens(self) -> Tensor:
        return torch.arange(len(self.order))

    @property
    def parts(self) -> tuple["_DrawnStates"]:
        return (self,)

    def begun(self, layer: int, part: "_DrawnStates") -> dict[str, Tensor]:
        state, generator = self.spec.layers[layer].state, torch.Generator().manual_seed(_SEED)
        assert state is not None, "a recurrent layer"
        drawn = {
            name: torch.randn(len(self.order), *shape, generator=generator)
            for name, shape in state.shapes.items()
        }
        return {name: numbers[self.order] for name, numbers in drawn.items()}

    load = begun

    def rounded(self, layer: int, name: str, state: Tensor) -> Tensor:
        return state

    def in_pages(self, layer: int, part: "_DrawnStates") -> None:
        return None

    def store(self, layer: int, part: "_DrawnStates", states: Mapping[str, Tensor]) -> None:
        return None


class _OwnRow(OwnValue):
    """Attention in which every row attends only to itself, with a state of its own."""

    def __init__(self, spec: ModelSpec, order: Tensor) -> None:
        self._states = TokenByToken(_DrawnStates(spec, order))

    @property
    def states(self) -> TokenByToken:
        return self._states

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        own = super().attend(call, query, key, value)
        if call.latent is None:
            return own + query.mean(dim=2, keepdim=True)
        return own + call.latent.unfold(call.latent.fold(query)[..., : value.shape[2]])


def rows_depend(decoder: Decoder, rows: int) -> str | None:
    """Compare forwards in different orders bit for bit; why a row depends on its index."""
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(decoder.spec.vocab_size, (rows,), generator=generator)
    in_order = torch.arange(rows)
    positions = in_order % decoder.spec.max_positions
    expected = decoder.forward(ids, positions, in_order, _OwnRow(decoder.spec, in_order))
    orders = (in_order.roll(1), in_order.flip(0), torch.randperm(rows, generator=generator))
    for order in orders:
        own = _OwnRow(decoder.spec, order)
        found = decoder.forward(ids[order], positions[order], in_order, own)
        if not torch.equal(found, expected[order]):
            return (
                f"with {torch.get_num_threads()} threads the logits of a token depend on its index "
                f"among the {rows} rows of a forward; set --threads to a power of two"
            )
    return None


T = TypeVar("T")


class _Stopped(Exception):
    """Raised in a waiting forward because another forward has failed."""


@dataclass(slots=True)
class _RoundRobin:
    """Runs forwards one at a time, in round-robin order."""

    # one semaphore for each forward; released when the forward may continue
    may_run: list[threading.Semaphore]
    enter: Callable[[int], None]  # called with the number of the forward that continues
    done: set[int] = field(default_factory=set)
    failed: bool = False

    def wait(self, number: int) -> None:
        self.may_run[number].acquire()
        if self.failed:
            raise _Stopped
        self.enter(number)

    def yield_to_next(self, number: int) -> None:
        count = len(self.may_run)
        order = ((number + ahead) % count for ahead in range(1, count + 1))
        following = next((other for other in order if other not in self.done), None)
        if following is not None:
            self.may_run[following].release()

    def fail(self) -> None:
        self.failed = True
        for semaphore in self.may_run:
            semaphore.release()


class LayerMajor:
    """The layers of one model; forwards switch at the start of each layer."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._device = device
        self._threads = ThreadPoolExecutor(MAX_CHUNKS, thread_name_prefix="quire-batch")
        self._thread = threading.local()
        self._round_robin: _RoundRobin | None = None
        for layer in layers:  # runs before all other hooks of the layer
            layer.register_forward_pre_hook(self._at_layer, prepend=True)

    def run(self, forwards: Sequence[Callable[[], T]], enter: Callable[[int], None]) -> list[T]:
        """Run at most `MAX_CHUNKS` forwards; `enter` gets a forward's number when it continues."""
        semaphores = [threading.Semaphore(0) for _ in forwards]
        round_robin = self._round_robin = _RoundRobin(semaphores, enter)
        stream = None
        if self._device.type == "cuda":
            stream = torch.cuda.current_stream(self._device)
        try:
            running = [
                self._threads.submit(
                    contextvars.copy_context().run, self._run, round_robin, number, forward, stream
                )
                for number, forward in enumerate(forwards)
            ]
            round_robin.may_run[0].release()
            wait(running)
        finally:
            self._round_robin = None
        errors = [e for e in (done.exception() for done in running) if e is not None]
        for error in errors:
            if not isinstance(error, _Stopped):
                raise error
        return [done.result() for done in running]

    def _run(
        self,
        round_robin: _RoundRobin,
        number: int,
        forward: Callable[[], T],
        stream: torch.cuda.Stream | None,
    ) -> T:
        self._thread.forward_number = number
        try:
            round_robin.wait(number)
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                result = forward()
        except BaseException:
            round_robin.fail()
            raise
        round_robin.done.add(number)
        round_robin.yield_to_next(number)
        return result

    def _at_layer(self, module: nn.Module, args: tuple[object, ...]) -> None:
        round_robin = self._round_robin
        if round_robin is not None:
            number = self._thread.forward_number
            round_robin.yield_to_next(number)
            round_robin.wait(number)


def in_turn(forwards: Sequence[Generator[None, None, T]]) -> list[T]:
    """Run forwards that yield before each of their layers, one layer of each after the other."""
    results: dict[int, T] = {}
    while len(results) < len(forwards):
        for number, forward in enumerate(forwards):
            try:
                next(forward)
            except StopIteration as ended:
                results[number] = ended.value
    return [results[number] for number in range(len(forwards))]


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
        self.model = model
        self.dtype: torch.dtype = model.dtype
        self.device: torch.device = model.device
        self.spec = rank_spec(ModelSpec.from_config(model.config.to_dict()), ranks)
        self._rope = RopeVariants(model)
        self._bridge = install(model)
        if self.device.type != "meta":  # without data, there is nothing to pack
            prepare_linears(model, () if weights is None else weights.modules, codec)
        self._forward_lock = ForwardLock()
        self._head_takes_rows = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._use_quire_attention()
        self._weights = weights
        self._last_states: LastStates | None = None
        for number, layer in enumerate(() if weights is None else weights.modules):
            hook = partial(self._begin_layer, number)
            layer.register_forward_pre_hook(hook, prepend=True)  # before it waits for its weights
        self._observing = Observing(model, self._bridge, self.spec, self._probe)

    @property
    def num_rope_variants(self) -> int:
        return self._rope.count

    def rope_variant(self, final_tokens: int) -> int:
        return self._rope.variant(final_tokens)

    def prepare(self, statistic: Statistic) -> str | None:
        return self._observing.prepare(statistic)

    def prepare_pre_rope(self) -> str | None:
        return self._observing.prepare_pre_rope()

    def prepare_hidden_states(self) -> str | None:
        if self._last_states is None:
            self._last_states, why_not = LastStates.of(self.model, self._probe)
            return why_not
        return None

    def prepare_fixed_shapes(self, rows: int) -> str | None:
        with self._forward_lock.held():
            make_activations_rowwise(self.model)
            return why_not_by_token(self.model) or rows_depend(self, rows)

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
        return self._observing.rotations(lambda: self._frequencies(rope_variant))

    def output_projections(self) -> OutputProjections | str:
        if self._weights is not None:
            return "the weights of some layers are offloaded (--weights-memory)"
        return self._observing.output_projections

    @contextmanager
    def _frequencies(self, rope_variant: int) -> Iterator[None]:
        """Select these RoPE frequencies outside of a forward, under the forward lock."""
        with self._forward_lock.held():
            self._rope.select(rope_variant)
            yield

    def _probe(self, positions: Sequence[int], attention: PagedAttention) -> None:
        """Run the model on one token at each of these positions, without computing logits."""
        places = torch.tensor(positions, device=self.device)
        token = torch.full_like(places, self.spec.vocab_size // 2)
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
        batch = Batch(token_ids, positions, sample_rows, attention)
        with self._forward_lock.held():
            self._rope.select(rope_variant)
            with self._bridge.attending(attention):
                return self._logits(batch)

    def forward_together(
        self, batches: Sequence[Batch], *, rope_variant: int = 0
    ) -> list[Float[Tensor, "num_samples vocab"]]:
        weights = nullcontext() if self._weights is None else self._weights.shared_by(len(batches))
        with self._forward_lock.held(), weights:
            self._rope.select(rope_variant)
            with self._bridge.attending(None):
                return self._together(batches)

    def _together(self, batches: Sequence[Batch]) -> list[Tensor]:
        def enter(number: int) -> None:
            self._bridge.switch(batches[number].attention)

        return self._layer_major.run([partial(self._logits, b) for b in batches], enter)

    def prepare_by_layer(self) -> str | None:
        try:
            decoder_layers(self.model, self.spec.num_layers)
        except UnsupportedModel as error:
            return str(error)
        return None

    @cached_property
    def _layer_major(self) -> LayerMajor:
        if self._weights is not None:
            return LayerMajor(self._weights.modules, self.device)
        return LayerMajor(decoder_layers(self.model, self.spec.num_layers), self.device)

    def _logits(self, batch: Batch) -> Tensor:
        return self._module_logits(batch)

    @torch.inference_mode()
    def _module_logits(self, batch: Batch) -> Tensor:
        head = {"logits_to_keep": batch.sample_rows} if self._head_takes_rows else {}
        with self._bridge.at_positions(batch.positions):
            output = self.model(
                **model_inputs(self.model, batch.token_ids, batch.positions),
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
        with self._forward_lock.held(), torch.inference_mode():
            self._rope.select(0)
            self._set_attention(reference_attention(type(self.model)))
            try:
                output = self.model(token_ids.unsqueeze(0), use_cache=False, return_dict=True)
            finally:
                self._use_quire_attention()
        logits: Tensor = output.logits[0]
        return logits

    def _set_attention(self, name: str) -> None:
        if has_own_attention(type(self.model)):  # Transformers sets it only with its interface
            self.model.config._attn_implementation = name
        else:
            self.model.set_attn_implementation(name)

    def _use_quire_attention(self) -> None:
        self._set_attention(ATTENTION_NAME)
        in_use = self.model.config._attn_implementation
        if in_use != ATTENTION_NAME:
            raise UnsupportedModel(
                f"{type(self.model).__name__} uses attention {in_use!r} and does not support "
                "Transformers' attention interface; run it with Transformers itself"
            )


def prepare_linears(
    model: nn.Module, left_alone: Sequence[nn.Module], codec: str | None = None
) -> None:
    """Replace the linear layers of a model on a CPU by the fastest ones for this CPU.

    Without layers left alone, the other weights are copied, so that no weight file stays mapped.
    Projections of latents keep their weights: attention multiplies with parts of them.
    """
    kept = [*left_alone, *read_projections(model)]
    products = fastest_products() if codec is None else available_products()
    if products is not None:
        pack_linears(model, products, kept, codec)
    else:
        reorder_linears(model, kept)
    widen_linears(model)
    if not left_alone:
        MappedFiles().copy_weights(model)
    trim_free_memory()
