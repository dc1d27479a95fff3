"""Fidelity: how closely a configuration follows the outputs of the full KV cache.

The reference is the greedy output with full KV in the model's dtype. A configuration is measured
on the same output: its tokens are forced, so that every distribution follows equal tokens.

top-1       fraction of output tokens that are also the most likely ones of the configuration
exact       1 if all are: the greedy outputs are then equal
KL          sum over tokens of p_full log(p_full / p), nats, mean over the output tokens. The most
            likely `LIKELIEST` tokens of full KV count singly, all others as one: a lower bound

Works with any model and any prompts; the model needs no trained weights to be compared with itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from quire.api.llm import LLM
from quire.config.kv_config import KVConfig, PrefixCacheConfig
from quire.config.sampling_params import SamplingParams
from quire.errors import InvariantError
from quire.evals.decoders import ForcingDecoder
from quire.models.loader import LoadedModel
from quire.sampling.outputs import RequestOutput, Usage

LIKELIEST = 256
"""Tokens of a distribution that are stored singly."""

FREE_BYTES = 8 << 20
"""KV memory in addition to that of one request: constants of the layout."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Reference:
    """Greedy output of one prompt with full KV.

    Attributes:
        prompt: token ids.
        output: generated token ids.
        likeliest: the most likely tokens after each position.
        logprobs: their natural log-probabilities.
        kv_peak_bytes: most KV bytes of the request.
        text: the output as text.
    """

    prompt: tuple[int, ...]
    output: tuple[int, ...]
    likeliest: Int[Tensor, "token likeliest"]
    logprobs: Float[Tensor, "token likeliest"]
    kv_peak_bytes: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFidelity:
    """Fidelity of one prompt.

    Attributes:
        top_1: fraction of tokens, 0 to 1.
        exact: 1.0 if the greedy output is the reference's, else 0.0.
        kl: mean nats of an output token.
        kv_peak_bytes: most KV bytes of the request.
    """

    top_1: float
    exact: float
    kl: float
    kv_peak_bytes: int


class FidelityScorer:
    """Runs prompts one by one in one configuration.

    Args:
        model: the model.
        kv: KV configuration; its memory and prefix cache are replaced.
        longest_tokens: most tokens of a prompt with its output.
        new_tokens: most output tokens.

    Raises:
        ConfigError: the configuration is invalid for this model.
        UnsoundCombination: options of the configuration exclude each other.
    """

    def __init__(
        self, model: LoadedModel, kv: KVConfig, *, longest_tokens: int, new_tokens: int
    ) -> None:
        self._decoder, self._new_tokens = ForcingDecoder(model.decoder), new_tokens
        itemsize = model.decoder.dtype.itemsize
        memory = 3 * model.spec.kv_bytes(longest_tokens, max(itemsize, 4)) + FREE_BYTES
        alone = replace(kv, memory=memory, prefix_cache=PrefixCacheConfig(enabled=False))
        self._llm = LLM(replace(model, decoder=self._decoder), kv=alone, verify=False)

    def reference(self, prompt: Sequence[int]) -> Reference:
        """Generate greedily.

        Raises:
            InvariantError: the request failed.
        """
        self._decoder.follow(())
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
        """Follow a reference.

        Raises:
            InvariantError: the request failed.
        """
        self._decoder.follow(reference.output)
        output, logits = self._run(reference.prompt, len(reference.output))
        found = logits.log_softmax(dim=1)
        agrees = found.argmax(dim=1) == torch.tensor(reference.output)
        return PromptFidelity(
            top_1=float(agrees.double().mean()),
            exact=float(agrees.all()),
            kl=bounded_kl(reference, found),
            kv_peak_bytes=output.usage.kv_peak_bytes,
        )

    def mean_nll(self, prompt: Sequence[int], continuation: Sequence[int]) -> tuple[float, Usage]:
        """Mean negative log-probability in nats of the tokens of a continuation.

        Each token is a decode step, so that an eviction rule acts as in generation.

        Raises:
            InvariantError: the request failed.
        """
        self._decoder.follow(continuation)
        output, logits = self._run(prompt, len(continuation))
        tokens = torch.tensor(continuation).unsqueeze(1)
        found = logits.double().log_softmax(dim=1).gather(1, tokens)
        return -float(found.mean()), output.usage

    def _run(
        self, prompt: Sequence[int], new_tokens: int
    ) -> tuple[RequestOutput, Float[Tensor, "token vocab"]]:
        params = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True)
        [output] = self._llm.generate([list(prompt)], params)
        logits = self._decoder.take()
        if output.error is not None or len(logits) != len(output.token_ids):
            raise InvariantError(f"expected logits of each token, got the error {output.error}")
        return output, logits


def bounded_kl(reference: Reference, found: Float[Tensor, "token vocab"]) -> float:
    """Mean KL in nats, with all unlikely tokens as one; at least 0.

    Args:
        reference: the likeliest tokens with full KV.
        found: natural log-probabilities of all tokens in a configuration.
    """
    full, same = reference.logprobs.double(), found.double().gather(1, reference.likeliest)
    kl = (full.exp() * (full - same)).sum(dim=1)
    rest, rest_found = (1 - each.exp().sum(dim=1).clamp(max=1.0) for each in (full, same))
    tiny = torch.finfo(torch.float32).tiny
    kl += torch.where(rest > 0, rest * (rest / rest_found.clamp(min=tiny)).clamp(min=tiny).log(), 0)
    return float(kl.clamp(min=0.0).mean())
