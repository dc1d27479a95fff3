"""`quire doctor`: one `model.generate` of Transformers with a QuireCache.

Versions of Transformers differ in what they pass to a cache, so that the engine can work with a
version with which `quire.hf` does not.
"""

import inspect
from typing import Any

from quire.errors import InvariantError

_PROMPT_TOKENS = 40
_NEW_TOKENS = 4


def generate_with_cache() -> str:
    """Generate with Transformers' own cache and with a QuireCache; compare the outputs.

    Raises:
        InvariantError: the outputs differ, or the cache was not used.
    """
    import torch
    from transformers import AutoConfig

    from quire.hf import QuireCache
    from quire.hf.cache_argument import cache_argument
    from quire.models.source import find_model
    from quire.models.stored import read_headers
    from quire.models.weights import read_model

    folder, _ = find_model("quire-tiny")
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    model: Any = read_model(folder, config, read_headers(folder), dtype=torch.float32)
    prompt = torch.arange(2, 2 + _PROMPT_TOKENS)[None]
    inputs = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    expected = model.generate(**inputs, max_new_tokens=_NEW_TOKENS, do_sample=False)
    name = str(cache_argument(inspect.signature(model.forward).parameters))
    with QuireCache(model) as cache:
        found = model.generate(
            **inputs, max_new_tokens=_NEW_TOKENS, do_sample=False, **{name: cache}
        )
        used_bytes = cache.kv_used_bytes
    if not used_bytes:
        raise InvariantError("model.generate of Transformers did not use the QuireCache")
    if not torch.equal(found, expected):
        raise InvariantError(
            f"output {found[0].tolist()} of model.generate with a QuireCache differs from "
            f"{expected[0].tolist()} without it"
        )
    return f"model.generate(..., {name}=QuireCache(model)): output equal to Transformers"
