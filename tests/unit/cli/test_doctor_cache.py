"""The check of `quire doctor` that uses a QuireCache in Transformers."""

import inspect

import pytest
from transformers import LlamaForCausalLM

from quire.cli.doctor import examine, generate_with_cache
from quire.errors import InvariantError
from quire.hf.cache_rows import CacheRows
from quire.models import wrapped
from quire.models.wrapped import cache_argument


def test_check_names_the_argument_of_this_version() -> None:
    name = cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)

    assert f"model.generate(..., {name}=QuireCache(model))" in generate_with_cache()


def test_wrong_output_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CacheRows.forward
    monkeypatch.setattr(CacheRows, "forward", lambda *given: -forward(*given))

    with pytest.raises(InvariantError, match="differs from"):
        generate_with_cache()


@pytest.mark.slow
def test_version_that_names_the_cache_otherwise_fails_the_check_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = cache_argument(inspect.signature(LlamaForCausalLM.forward).parameters)
    monkeypatch.setattr(wrapped, "CACHE_ARGUMENTS", ("another_name",))
    monkeypatch.setattr(wrapped, "cache_argument", lambda _: name)

    found = {finding.name: finding for finding in examine()}

    assert not found["QuireCache"].ok
    assert "QuireCache works only in" in found["QuireCache"].value
    assert found["test request"].ok
