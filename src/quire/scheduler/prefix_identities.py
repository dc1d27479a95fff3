"""Says who may share the beginning of a request's KV."""

import secrets
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from quire.config.generation_request import DEFAULT_TENANT
from quire.kv.prefix_key import PrefixIdentity, private_salt, root_key
from quire.scheduler.request import Request

SECRET_BYTES = 32


class PrefixIdentities:
    """Makes the identity of a request's prefix from its tenant, its salt and what is public.

    Args:
        made_by: all that KV depends on besides tokens: model, precision, codec, policy.
        secret: salts are derived from it; drawn at random where none is given.
    """

    def __init__(self, made_by: Sequence[str] = (), *, secret: bytes | None = None) -> None:
        self._made_by = tuple(made_by)
        self._secret = secrets.token_bytes(SECRET_BYTES) if secret is None else secret
        self._roots: dict[int, bytes] = {}
        self._public: list[NDArray[np.int64]] = []

    def register_public(self, token_ids: Sequence[int]) -> None:
        """Let every tenant share the KV of these tokens where a prompt begins with them."""
        self._public.append(np.asarray(token_ids, dtype=np.int64))

    def of(self, request: Request) -> PrefixIdentity:
        """The identity of a request's prefix."""
        variant = request.rope_variant
        if variant not in self._roots:
            self._roots[variant] = root_key(*self._made_by, str(variant))
        return PrefixIdentity(self._roots[variant], self._salt(request), self._num_public(request))

    def _salt(self, request: Request) -> bytes:
        """Nothing where no tenants and no salts are in use: then all callers trust each other."""
        if (request.tenant, request.cache_salt) == (DEFAULT_TENANT, ""):
            return b""
        return private_salt(self._secret, request.tenant, request.cache_salt)

    def _num_public(self, request: Request) -> int:
        prompt = np.asarray(request.prompt_token_ids) if self._public else None
        return max((_common(prompt, public) for public in self._public), default=0)


def _common(prompt: NDArray[np.int64] | None, public: NDArray[np.int64]) -> int:
    """How many first tokens are the same."""
    assert prompt is not None
    shortest = min(len(prompt), len(public))
    differ = np.flatnonzero(prompt[:shortest] != public[:shortest])
    return int(differ[0]) if len(differ) else shortest
