"""Families whose layers use Transformers' attention interface since Transformers 5.24."""

import sys
from pathlib import Path

import pytest
import torch
from transformers import (
    CodeGenConfig,
    CodeGenForCausalLM,
    GPTJConfig,
    GPTJForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from quire import LLM, KVConfig, SamplingParams
from quire.errors import UnsupportedModel
from quire.layout.limits import WITH_NEWER_TRANSFORMERS
from quire.models.support import refuse_class

VOCABULARY = 97
PROMPTS = [[5, 9, 13, 17, 21, 25, 29], [40, 41, 42, 43] * 5]
CLASSES: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {
    GPTJConfig: GPTJForCausalLM,
    CodeGenConfig: CodeGenForCausalLM,
}
NEW_TOKENS = 12


def build(kind: type[PreTrainedConfig]) -> PreTrainedModel:
    torch.manual_seed(3)
    shape = {"n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": 128}
    config = kind(vocab_size=VOCABULARY, bos_token_id=0, eos_token_id=1, **shape)
    return CLASSES[kind](config).eval()


def has_interface(model_class: type[PreTrainedModel]) -> bool:
    return hasattr(sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS")


def generated(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = torch.tensor([prompt])
    tokens = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kind", CLASSES)
def test_outputs_equal_transformers(kind: type[PreTrainedConfig], tmp_path: Path) -> None:
    model = build(kind)
    if not has_interface(type(model)):
        pytest.skip("this version of Transformers has no attention interface in this family")
    model.save_pretrained(tmp_path)
    llm = LLM(str(tmp_path), dtype="float32", kv=KVConfig(memory="64KiB"))

    greedy = SamplingParams(max_tokens=NEW_TOKENS, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(PROMPTS, greedy)

    assert [list(output.token_ids) for output in outputs] == [
        generated(model, prompt) for prompt in PROMPTS
    ]


@pytest.mark.parametrize("model_class", CLASSES.values())
def test_an_older_transformers_is_named_in_the_error(
    model_class: type[PreTrainedModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert model_class.config_class.model_type in WITH_NEWER_TRANSFORMERS
    monkeypatch.delattr(
        sys.modules[model_class.__module__], "ALL_ATTENTION_FUNCTIONS", raising=False
    )

    with pytest.raises(UnsupportedModel, match=r"install transformers>=5\.24"):
        refuse_class(model_class)
