"""KV export: the KV of a request's prefix leaves one engine and enters another one.

    engine 1   prompt computed --> gather --> file, store or another process
    engine 2                       insert --> cached prefix --> the request continues

Only whole blocks are exported, from before a sequence's first eviction, with the statistics that
the request's rule and codec need at their end. At least one token of a prompt is always computed,
because its output is needed.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

from quire.config.generation_request import GenerationRequest
from quire.config.sampling_params import SamplingParams
from quire.engine.input_processor import InputProcessor
from quire.engine.open_tier import kv_fingerprint
from quire.engine.pool import KVPool
from quire.errors import RequestError
from quire.kv.prefix import PrefixIndex, PrefixLease
from quire.layout import limits
from quire.models.loader import LoadedModel
from quire.offload.prefix_store.prefix_kv import PrefixKV, gather, insert
from quire.scheduler.request import Request
from quire.scheduler.sequence_memory import SequenceMemory


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedKV:
    """What was saved to a file or loaded from it."""

    num_tokens: int  # whole blocks
    num_bytes: int  # KV and statistics
    fingerprint: str  # of model, precision, codec and layout; must be equal in both engines


class KVExport:
    """Copies cached prefixes of one engine out of its KV memory and into it."""

    def __init__(
        self,
        model: LoadedModel,
        pool: KVPool,
        sequence_memory: SequenceMemory,
        input_processor: InputProcessor,
    ) -> None:
        self._sequence_memory, self._inputs = sequence_memory, input_processor
        self._fingerprint: Callable[[], str] = cache(lambda: kv_fingerprint(pool, model))

    @property
    def block_tokens(self) -> int:
        return self._index().block_tokens

    def gather(self, requested: GenerationRequest) -> tuple[PrefixKV | None, bool]:
        """Copy the cached prefix of a request; and whether it has all whole blocks."""
        index, request = self._index(), self._request(requested)
        if request.computes_whole_prompt:
            raise RequestError(
                "expected a request whose prefix is cached, got one with prompt log-probabilities "
                "or mean pooling, which computes its whole prompt; leave these out"
            )
        lease = self._sequence_memory.look_up(request)
        assert lease is not None, "the engine has a prefix cache"
        try:
            return self._copy(index, request, requested, lease), self._has_all(
                index, request, lease
            )
        finally:
            self._sequence_memory.release(lease)

    def _copy(
        self,
        index: PrefixIndex,
        request: Request,
        requested: GenerationRequest,
        lease: PrefixLease,
    ) -> PrefixKV | None:
        if not lease.nodes:
            return None
        return gather(
            index,
            lease,
            self._fingerprint(),
            statistics=request.memory.statistics,
            options={
                "evict": requested.evict,
                "prompt_tokens": len(request.prompt_token_ids),
                "max_tokens": request.params.max_tokens,
                "rope": self._sequence_memory.identities.variant(request),
            },
        )

    def _has_all(self, index: PrefixIndex, request: Request, lease: PrefixLease) -> bool:
        most = min(len(request.prompt_token_ids) - 1, request.exact_tokens)
        return most - lease.tokens < index.block_tokens

    def insert(self, kv: PrefixKV, *, tenant: str, cache_salt: str) -> ExportedKV:
        """Cache a prefix that another engine has computed.

        Raises:
            RequestError: the KV is that of another model, codec or layout, or of a rule that this
                engine does not allow.
            OutOfPages: too few free pages.
            UnsoundCombination: the engine has no prefix cache.
        """
        index = self._index()
        if kv.fingerprint != self._fingerprint():
            raise RequestError(
                f"expected KV with the fingerprint {self._fingerprint()} of this engine's model, "
                f"precision, codec and page size, got {kv.fingerprint}; export it with an engine "
                "of the same options"
            )
        options = dict(kv.options)
        prompt, variant = kv.tokens.tolist(), options["rope"]
        prompt += [prompt[-1]] * (options["prompt_tokens"] - len(prompt))  # its length counts only
        requested = GenerationRequest(
            prompt,
            SamplingParams(max_tokens=options["max_tokens"]),
            tenant=tenant,
            cache_salt=cache_salt,
            evict=options["evict"],
        )
        request = self._request(requested)
        identity = self._sequence_memory.identities.of(request)
        found = self._sequence_memory.identities.variant(request)
        if found != variant or request.memory.statistics != kv.statistics:
            raise RequestError(
                f"expected KV of RoPE variant {found} with the statistics "
                f"{sorted(request.memory.statistics)}, got {variant} with {sorted(kv.statistics)}; "
                "start both engines with the same --evict and --max-model-len"
            )
        tokens = insert(index, identity, kv)
        return ExportedKV(num_tokens=tokens, num_bytes=kv.num_bytes, fingerprint=kv.fingerprint)

    def _index(self) -> PrefixIndex:
        index = self._sequence_memory.prefix
        if index is None:
            raise limits.refused(limits.EXPORT_WITHOUT_CACHE)
        return index

    def _request(self, requested: GenerationRequest) -> Request:
        return self._inputs.make(replace(requested, deadline_s=None), "kv-export", 0)
