"""Timed components of a step: wrappers around a decoder, its attention and the sampler.

The native decoder adds up the time of its C calls. In a model with the layers of Transformers,
hooks record the time of modules.
"""

import time
from collections.abc import Sequence

from jaxtyping import Float, Int
from torch import Tensor, nn

from benchmarks.roofline.measured import PARTS
from quire.evals.fidelity import ForwardingDecoder
from quire.kernels.backend import AttentionMath
from quire.kernels.chains import HeadBuffers
from quire.kernels.native.chain import PartTimes
from quire.models.adapter import TransformersDecoder
from quire.models.base import AttentionCall, ChainedAttention, PagedAttention
from quire.models.native.decoder import NativeDecoder
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
