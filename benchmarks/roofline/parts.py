"""Components of a step: their time, the bytes that they really read, and their arithmetic.

Wrappers around a decoder, its attention and the sampler measure the time.

The native decoder adds up the time of its C calls. In a model with the layers of Transformers,
hooks record the time of modules.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks.common.decoding import ForwardingDecoder
from benchmarks.roofline.measured import PARTS
from benchmarks.roofline.rates import BFLOAT16, FLOAT32, INT8
from quire.engine.core import Engine
from quire.kernels.backend import AttentionMath, HeadBuffers
from quire.kernels.native.arguments import AVX512_BF16
from quire.kernels.native.chain import PartTimes
from quire.kernels.native.library import NativeLibrary, load_library
from quire.kernels.native.linear import CODED, PackedWeight, Products
from quire.layout.model import ModelSpec
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall, ChainedAttention, Decoder, PagedAttention
from quire.models.linear_weights import ReorderedLinear, WidenedLinear
from quire.models.native.decoder import NativeDecoder
from quire.plan.roofline import STATE_VALUE_BYTES, PartCost, RowTokens, step_parts
from quire.sampling.logits import SamplingRow
from quire.sampling.sampler import SampledToken, Sampler

NORMS = "norms and RoPE"
MODULES = {
    "q_proj": "qkv",
    "k_proj": "qkv",
    "v_proj": "qkv",
    "o_proj": "output projection",
    "mlp": "mlp",
    "lm_head": "head",
    "input_layernorm": NORMS,
    "post_attention_layernorm": NORMS,
    "norm": NORMS,
    "rotary_emb": NORMS,
}


class TimedDecoder(ForwardingDecoder):
    """A decoder that adds up the time of its components in `seconds`.

    Args:
        inner: decoder of a model with Llama's module names.
    """

    def __init__(self, inner: TransformersDecoder) -> None:
        super().__init__(inner)
        self.inner = inner
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._calls: PartTimes | None = None
        if isinstance(inner, NativeDecoder):
            self._calls = inner.time_parts()
            return
        for name, module in inner.model.named_modules():
            part = MODULES.get(name.rpartition(".")[2])
            if part is not None:
                self._watch(module, part)

    def reset(self) -> None:
        """Set all times to 0."""
        self.seconds.update(dict.fromkeys(PARTS, 0.0))

    def forward(
        self,
        token_ids: Int[Tensor, " num_tokens"],
        positions: Int[Tensor, " num_tokens"],
        sample_rows: Int[Tensor, " num_samples"],
        attention: PagedAttention,
        *,
        rope_variant: int = 0,
    ) -> Float[Tensor, "num_samples vocab"]:
        """See `Decoder.forward`; time outside the components is added to `rest`."""
        before_s = self._parts_s()
        timed = _TimedAttention(attention, self.seconds)
        started_s = time.perf_counter()
        logits = super().forward(
            token_ids, positions, sample_rows, timed, rope_variant=rope_variant
        )
        whole_s = time.perf_counter() - started_s
        self._add_calls()
        self.seconds["rest"] += whole_s - (self._parts_s() - before_s)
        return logits

    def _parts_s(self) -> float:
        return sum(part_s for part, part_s in self.seconds.items() if part != "rest")

    def _add_calls(self) -> None:
        if self._calls is None:
            return
        for part, part_s in self._calls.seconds().items():
            self.seconds[part] += part_s
        self._calls.reset()

    def _watch(self, module: nn.Module, part: str) -> None:
        started_s = 0.0

        def start(_module: nn.Module, _arguments: object) -> None:
            nonlocal started_s
            started_s = time.perf_counter()

        def stop(_module: nn.Module, _arguments: object, _output: object) -> None:
            self.seconds[part] += time.perf_counter() - started_s

        module.register_forward_pre_hook(start)
        module.register_forward_hook(stop)


class _TimedAttention:
    """Attention of a step, with the writing of keys and values."""

    def __init__(self, inner: PagedAttention, seconds: dict[str, float]) -> None:
        self._inner, self._seconds = inner, seconds

    def attend(self, call: AttentionCall, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """See `PagedAttention.attend`."""
        started_s = time.perf_counter()
        out = self._inner.attend(call, query, key, value)
        self._seconds["attention"] += time.perf_counter() - started_s
        return out

    def chain(self, layers: Sequence[AttentionMath], heads: HeadBuffers) -> Sequence[object] | None:
        """See `ChainedAttention.chain`; the decoder times the calls."""
        if not isinstance(self._inner, ChainedAttention):
            return None
        return self._inner.chain(layers, heads)


class TimedSampler(Sampler):
    """A sampler that adds up its time.

    Args:
        inner: samples.
    """

    def __init__(self, inner: Sampler) -> None:
        super().__init__(
            inner.vocab_size,
            inner.eos_token_ids,
            undecodable_ids=inner.undecodable_ids,
            one_by_one=inner.one_by_one,
        )
        self._inner, self.taken_s = inner, 0.0

    def sample(
        self, logits: Float[Tensor, "rows vocab"], rows: Sequence[SamplingRow]
    ) -> list[SampledToken]:
        """See `Sampler.sample`."""
        started_s = time.perf_counter()
        tokens = self._inner.sample(logits, rows)
        self.taken_s += time.perf_counter() - started_s
        return tokens


_PARTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "qkv_proj"), "qkv"),
    "o_proj": "output projection",
    **dict.fromkeys(("gate_proj", "up_proj", "gate_up_proj", "down_proj"), "mlp"),
    "lm_head": "head",
}
_PLAIN_BYTES = 2  # of a KV element in `step_parts`


@dataclass(frozen=True, slots=True, kw_only=True)
class Storage:
    """Storage of a model's weights and KV.

    Attributes:
        weight_bytes: bytes of the linear layers of a component.
        arithmetic: arithmetic of a component's products.
        kv_bytes_per_token: of all layers; without recurrent states.
    """

    weight_bytes: Mapping[str, int]
    arithmetic: Mapping[str, str]
    kv_bytes_per_token: float

    @property
    def arithmetics(self) -> Iterable[str]:
        """Names of the arithmetics, without repeats."""
        return dict.fromkeys(self.arithmetic.values())


def storage_of(engine: Engine) -> Storage:
    """Storage of a Llama in an engine."""
    decoder = unwrapped(engine.model.decoder)
    weight_bytes: dict[str, int] = {}
    arithmetic: dict[str, str] = {}
    seen: set[int] = set()
    for name, module in decoder.model.named_modules():
        part = _PARTS.get(name.rpartition(".")[2])
        if part is None:
            continue
        address, num_bytes, kind = _weight_of(module)
        if address not in seen:  # gate and up share a packed weight
            seen.add(address)
            weight_bytes[part] = weight_bytes.get(part, 0) + num_bytes
            arithmetic[part] = kind
    groups = engine.pool.kv.memory.layout.groups
    arithmetic["attention"] = attention_arithmetic(engine)
    return Storage(
        weight_bytes=weight_bytes,
        arithmetic=arithmetic,
        kv_bytes_per_token=sum(
            group.num_lanes * group.page_class.page_bytes / group.page_class.tokens
            for group in groups
            if group.state is None
        ),
    )


def unwrapped(decoder: Decoder) -> TransformersDecoder:
    """The decoder of a Transformers model, without the clocks around it."""
    if isinstance(decoder, TimedDecoder):
        return decoder.inner
    assert isinstance(decoder, TransformersDecoder), "of a Transformers model"
    return decoder


def _weight_of(module: nn.Module) -> tuple[int, int, str]:
    """Address and bytes of a layer's weight, and the arithmetic of its product."""
    packed = getattr(module, "packed", None)
    if isinstance(packed, PackedWeight):
        return packed.panels.data_ptr(), packed.num_bytes, _packed_arithmetic(packed)
    if isinstance(module, ReorderedLinear):
        return id(module), module.reordered_bytes, BFLOAT16
    weight = module.weight
    assert isinstance(weight, Tensor), "a linear layer"
    is_bfloat16 = weight.dtype == torch.bfloat16 and not isinstance(module, WidenedLinear)
    return weight.data_ptr(), weight.nbytes, BFLOAT16 if is_bfloat16 else FLOAT32


def _packed_arithmetic(weight: PackedWeight) -> str:
    if weight.kind in CODED:
        return INT8
    library = load_library()
    assert isinstance(library, NativeLibrary), "it packed the weight"
    activations = Products(library).activation_dtype(weight, torch.bfloat16)
    return BFLOAT16 if activations == torch.bfloat16 else FLOAT32


def attention_arithmetic(engine: Engine) -> str:
    """Arithmetic of the products of attention: the fastest one that a kernel may use."""
    library = load_library()
    if not isinstance(library, NativeLibrary) or engine.pool.kv.backend.name != "native":
        return BFLOAT16 if engine.model.decoder.dtype == torch.bfloat16 else FLOAT32
    return BFLOAT16 if library.path == AVX512_BF16 else FLOAT32


def step_costs(
    spec: ModelSpec, storage: Storage, rows: Sequence[RowTokens], *, sampled_rows: int
) -> tuple[PartCost, ...]:
    """Cost of each component of a step, in the order of PARTS."""
    found = {
        part.name: part
        for part in step_parts(spec, rows, sampled_rows=sampled_rows, bytes_per_value=_PLAIN_BYTES)
    }
    for part, num_bytes in storage.weight_bytes.items():
        if found[part].weight_bytes:  # no head without sampled rows
            found[part] = replace(found[part], weight_bytes=num_bytes)
    plain_bytes = spec.kv_bytes_per_token(_PLAIN_BYTES)
    state_bytes = 2 * len(rows) * STATE_VALUE_BYTES * spec.state_values  # read and written
    kv_bytes = found["attention"].kv_bytes - state_bytes
    kv_bytes = round(kv_bytes * storage.kv_bytes_per_token / plain_bytes) + state_bytes
    found["attention"] = replace(found["attention"], kv_bytes=kv_bytes)
    norm_bytes = (2 * spec.num_layers + 1) * spec.hidden_size * _PLAIN_BYTES
    rest = found["rest"]
    found[NORMS] = replace(rest, name=NORMS, weight_bytes=norm_bytes)
    found["rest"] = replace(rest, weight_bytes=rest.weight_bytes - norm_bytes)
    return tuple(found[part] for part in PARTS)
