"""A run resumes exactly, and its output is a Llama that Transformers loads."""

import json

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from quire.errors import ConfigError
from quire.evals.tasks.words import haystack
from training.config import Recipe
from training.data import BatchMaker
from training.export import load_pretrained, save_pretrained, to_llama_state
from training.model import Decoder, make_rope
from training.schedule import parse_mixture
from training.structured_init import structured_init
from training.train import Run, parse
from training.trainer import Trainer
from unit.training.shapes import QUIRE_TINY, SMALL

RECIPE = Recipe(plan="48:3:192,64:3:128", warmup_steps=2, seed=4)


def make_trainer(recipe=RECIPE):
    torch.manual_seed(recipe.seed)
    tokenizer = Tokenizer.from_file(str(QUIRE_TINY / "tokenizer.json"))
    maker = BatchMaker(tokenizer, haystack().text, parse_mixture(recipe.mixture), recipe.seed)
    return Trainer(Decoder(SMALL), maker, recipe)


def weights(trainer):
    return {name: value.clone() for name, value in trainer.model.state_dict().items()}


def test_resumed_run_equals_uninterrupted_run_bit_for_bit(tmp_path):
    whole = make_trainer()
    for _ in range(6):
        whole.advance()
    first = make_trainer()
    for _ in range(2):
        first.advance()
    first.save(tmp_path / "state.pt")
    with pytest.raises(ConfigError, match="another --out"):
        make_trainer(Recipe(plan=RECIPE.plan, seed=5)).load(tmp_path / "state.pt")
    second = make_trainer()
    second.load(tmp_path / "state.pt")
    for _ in range(4):
        second.advance()

    assert second.finished
    assert (second.step, second.tokens) == (whole.step, whole.tokens)
    assert second.accuracy == whole.accuracy
    for name, value in weights(whole).items():
        assert torch.equal(value, weights(second)[name]), name


def test_training_lowers_the_loss_of_repeated_batches():
    trainer = make_trainer(Recipe(plan="48:12:192", warmup_steps=1, decay=0.1, mixture="text=1"))
    batch = trainer.maker.batch(0, trainer.plan.stages[0], 0.0)
    trainer.maker.batch = lambda *_: batch
    losses = [trainer.advance() for _ in range(12)]

    assert losses[-1] < losses[0] - 0.5


def test_micro_batches_have_the_gradients_of_the_whole_batch():
    gradients = []
    for micro_tokens in (48, 192):
        trainer = make_trainer(Recipe(plan="48:3:192", micro_tokens=micro_tokens, autocast=False))
        batch = trainer.maker.batch(0, trainer.plan.stages[0], 0.5)
        trainer.backward(batch, 48)
        gradients.append(trainer.model.embed.weight.grad)

    assert gradients[0].abs().max() > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)


@pytest.fixture
def saved(tmp_path):
    torch.manual_seed(0)
    model = Decoder(SMALL)
    structured_init(model, seed=1)
    with torch.no_grad():
        for block in model.blocks:
            block.down.weight.normal_(std=0.05)
            block.norm1.add_(0.1 * torch.randn(SMALL.hidden_size))
    save_pretrained(model, QUIRE_TINY / "tokenizer.json", tmp_path / "model")
    return model, tmp_path / "model"


def test_transformers_computes_equal_logits_from_the_export(saved):
    _, folder = saved
    twin = load_pretrained(folder)
    llama = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, SMALL.vocab_size, (2, 140), generator=torch.Generator().manual_seed(0))
    rope = make_rope(SMALL, 140, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        ours, theirs = twin.logits(ids, rope), llama(ids).logits

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert theirs.std() > 0.1


def test_explicit_attention_of_short_sequences_is_equal_and_the_export_round_trips(saved):
    model, folder = saved
    ids = torch.randint(3, SMALL.vocab_size, (1, 100), generator=torch.Generator().manual_seed(0))
    rope = make_rope(SMALL, 100, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        explicit, fused = model.logits(ids, rope), model.logits(ids, rope._replace(mask=None))

    assert rope.mask is not None
    torch.testing.assert_close(explicit, fused, rtol=1e-4, atol=1e-4)
    restored = to_llama_state(load_pretrained(folder))
    for name, value in to_llama_state(model).items():
        assert torch.equal(value, restored[name]), name


def test_exported_tokenizer_has_document_token_and_single_digits(saved):
    _, folder = saved
    assert sum(p.numel() for p in load_pretrained(QUIRE_TINY).parameters()) == 6_328_576
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|doc|>line 48213")["input_ids"]

    assert ids[0] == 2
    assert len(tokenizer("48213")["input_ids"]) == 5
    assert tokenizer.decode(ids[1:]) == "line 48213"


def smoke_options(folder, *more):
    return parse(["--smoke", "--out", str(folder), "--threads", "1", *more])


@pytest.mark.slow
def test_interrupted_smoke_run_resumes(tmp_path, capsys):
    whole = Run(smoke_options(tmp_path / "whole"))
    whole.train()
    Run(smoke_options(tmp_path / "cut", "--minutes", "0.0001")).train()
    part = Run(smoke_options(tmp_path / "cut"))
    assert 0 < part.trainer.step < part.trainer.plan.steps
    part.train()

    assert part.trainer.finished
    for name, value in weights(whole.trainer).items():
        assert torch.equal(value, weights(part.trainer)[name]), name
    lines = (tmp_path / "whole.work/log.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows if "held_out" in row] == [12, 18]
    assert LlamaForCausalLM.from_pretrained(tmp_path / "cut").config.hidden_size == 64
    assert '"step": 18' in capsys.readouterr().out


@pytest.mark.slow
def test_run_continues_from_the_shipped_weights(tmp_path):
    options = smoke_options(tmp_path / "more", "--from-pretrained", str(QUIRE_TINY))
    options.plan, options.judge, options.structured = "64:1:128", 0, False
    run = Run(options)
    before = weights(run.trainer)
    run.train()
    after = weights(run.trainer)

    shipped = load_pretrained(QUIRE_TINY).state_dict()
    assert all(torch.equal(before[name], shipped[name]) for name in before)
    assert 0 < (after["embed.weight"] - before["embed.weight"]).abs().max() < 0.01
