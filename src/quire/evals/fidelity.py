"""Fidelity: how closely a configuration follows the outputs of the full KV cache.

The reference is the greedy output with full KV in the model's dtype. A configuration is measured
on the same output: its tokens are forced, so that every distribution follows equal tokens.

top-1       fraction of output tokens that are also the most likely ones of the configuration
exact       1 if all are: the greedy outputs are then equal
KL          sum over tokens of p_full log(p_full / p), nats, mean over the output tokens. The most
            likely `LIKELIEST` tokens of full KV count singly, all others as one: a lower bound

Works with any model and any prompts; the model needs no trained weights to be compared with itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Unpack

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.api.llm import LLM
from quire.config.generation_request import OptionsOfMany
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError, RequestError
from quire.models.loader import LoadedModel
from quire.sampling.outputs import RequestOutput
from quire.sampling.sampler import SampledToken, Sampler


@dataclass(frozen=True, slots=True)
class ForcedToken:
    """What a model gave a forced token."""

    logprob: float  # natural
    is_likeliest: bool


class ForcingSampler(Sampler):
    """Makes given tokens the most likely ones, so that greedy requests begin with them.

    Distributions of two configurations are thus compared after equal tokens, and a question is
    appended to a context whose KV is evicted already. The logits are edited, not the tokens: with
    tensor parallelism all ranks get what the inner sampler returns.

    Args:
        inner: samples from the edited logits.
        tokens: of each request, by its id.
        recorded: receives the logits of each step before they are edited, float32.
        scored: receives the forced tokens of each request, by its id.
    """

    def __init__(
        self,
        inner: Sampler,
        tokens: Mapping[str, Sequence[int]],
        recorded: list[Float[Tensor, "rows vocab"]] | None = None,
        scored: Mapping[str, list[ForcedToken]] | None = None,
    ) -> None:
        super().__init__(inner.vocab_size, inner.eos_token_ids, one_by_one=inner.one_by_one)
        self._inner, self._tokens, self._recorded = inner, tokens, recorded
        self._scored = scored

    def sample(
        self, logits: Float[Tensor, "rows vocab"], rows: Sequence[Any]
    ) -> list[SampledToken]:
        if self._recorded is not None:
            self._recorded.append(logits.float().cpu())
        logits = logits.clone()
        for own, row in zip(logits, rows, strict=True):
            for token in self._tokens[row.request_id][row.num_output_tokens :][:1]:
                if self._scored is not None:
                    self._scored[row.request_id].append(_forced(own, token))
                own.fill_(torch.finfo(own.dtype).min)[token] = 0.0
        return self._inner.sample(logits, rows)


def _forced(logits: Float[Tensor, " vocab"], token: int) -> ForcedToken:
    logprobs = logits.float().log_softmax(dim=0)
    return ForcedToken(float(logprobs[token]), bool(logprobs[token] == logprobs.max()))


def generate_after(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    forced: Sequence[Sequence[int]],
    params: Sequence[SamplingParams] | SamplingParams,
    recorded: list[Float[Tensor, "rows vocab"]] | None = None,
    scored: list[list[ForcedToken]] | None = None,
    **options: Unpack[OptionsOfMany],
) -> list[RequestOutput]:
    """Generate outputs that begin with the forced tokens; `max_tokens` includes these.

    With `recorded`, the logits of each step are added to it, and with `scored` the forced tokens of
    each prompt; see `ForcingSampler`. Further options are those of `LLM.generate`.
    """
    step, ids = llm.engine.sampling_step, [f"forced-{index}" for index in range(len(prompts))]
    inner = step.sampler
    if any(forced) or recorded is not None:
        found: dict[str, list[ForcedToken]] = {name: [] for name in ids}
        step.sampler = ForcingSampler(
            inner,
            dict(zip(ids, forced, strict=True)),
            recorded,
            None if scored is None else found,
        )
        if scored is not None:
            scored += found.values()
    try:
        options["request_id"] = ids
        return llm.generate(list(map(list, prompts)), params, **options)
    finally:
        step.sampler = inner


LIKELIEST = 256
"""Tokens of a distribution that are stored singly."""

FREE_BYTES = 8 << 20
"""KV memory in addition to that of one request: constants of the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Greedy output of one prompt with full KV."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    likeliest: Int[Tensor, "token likeliest"]  # the most likely tokens after each position
    logprobs: Float[Tensor, "token likeliest"]  # natural
    kv_peak_bytes: int  # of the request
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFidelity:
    """Fidelity of one prompt."""

    top_1: float  # fraction of tokens, 0 to 1
    exact: float  # 1.0 if the greedy output is the reference's, else 0.0
    kl: float  # mean nats of an output token
    kv_peak_bytes: int


class FidelityScorer:
    """Runs prompts one by one in one configuration."""

    def __init__(
        self, model: LoadedModel, kv: KVConfig, *, longest_tokens: int, new_tokens: int
    ) -> None:
        self._new_tokens = new_tokens
        itemsize = model.decoder.dtype.itemsize
        memory = 3 * model.spec.kv_bytes(longest_tokens, max(itemsize, 4)) + FREE_BYTES
        alone = replace(kv, memory=memory, prefix_cache=PrefixCacheConfig(enabled=False))
        self._llm = LLM(model, kv=alone, verify=False)

    def reference(self, prompt: Sequence[int]) -> Reference:
        output, logits = self._run(prompt, self._new_tokens)
        logprobs, likeliest = logits.log_softmax(dim=1).topk(min(LIKELIEST, logits.shape[1]))
        return Reference(
            prompt=tuple(prompt),
            output=tuple(output.token_ids),
            likeliest=likeliest,
            logprobs=logprobs,
            kv_peak_bytes=output.usage.kv_peak_bytes,
            text=output.text,
        )

    def score(self, reference: Reference) -> PromptFidelity:
        output, logits = self._run(reference.prompt, len(reference.output), forced=reference.output)
        found = logits.log_softmax(dim=1)
        agrees = found.argmax(dim=1) == torch.tensor(reference.output)
        return PromptFidelity(
            top_1=float(agrees.double().mean()),
            exact=float(agrees.all()),
            kl=bounded_kl(reference, found),
            kv_peak_bytes=output.usage.kv_peak_bytes,
        )

    def _run(
        self, prompt: Sequence[int], new_tokens: int, *, forced: Sequence[int] = ()
    ) -> tuple[RequestOutput, Float[Tensor, "token vocab"]]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        recorded: list[Tensor] = []
        [output] = generate_after(self._llm, [prompt], [forced], params, recorded)
        logits = torch.cat(recorded) if recorded else torch.empty(0)
        if output.error is not None:
            raise RequestError(f"a request of the evaluation failed: {output.error}")
        if len(logits) != len(output.token_ids):
            raise InvariantError(
                f"expected logits of {len(output.token_ids)} tokens, got {len(logits)}"
            )
        return output, logits


def bounded_kl(reference: Reference, found: Float[Tensor, "token vocab"]) -> float:
    """Mean KL in nats, with all unlikely tokens as one; at least 0."""
    full, same = reference.logprobs.double(), found.double().gather(1, reference.likeliest)
    kl = (full.exp() * (full - same)).sum(dim=1)
    rest, rest_found = (1 - each.exp().sum(dim=1).clamp(max=1.0) for each in (full, same))
    tiny = torch.finfo(torch.float32).tiny
    kl += torch.where(rest > 0, rest * (rest / rest_found.clamp(min=tiny)).clamp(min=tiny).log(), 0)
    return float(kl.clamp(min=0.0).mean())
