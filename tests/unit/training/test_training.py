import json
import lzma
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaForCausalLM

from quire.errors import ConfigError
from quire.evals.tasks.words import haystack
from training.books import load_books, split_documents, to_ascii
from training.config import ModelConfig, Recipe
from training.data import KINDS, BatchMaker
from training.export import load_pretrained, save_pretrained, to_llama_state
from training.model import Decoder, make_rope
from training.muon import orthogonalise
from training.schedule import Primer, Stage, lr_factor, parse_mixture, parse_plan
from training.structured_init import structured_init
from training.tokenizer import train_tokenizer
from training.train import Run, parse
from training.trainer import Trainer

QUIRE_TINY = Path(str(files("quire") / "assets")) / "quire-tiny"
SIZES = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16}
SMALL = ModelConfig(num_attention_heads=4, num_key_value_heads=2, **SIZES)
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


def test_export_has_equal_logits_and_single_digits(saved):
    _, folder = saved
    twin = load_pretrained(folder)
    llama = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.randint(3, SMALL.vocab_size, (2, 140), generator=torch.Generator().manual_seed(0))
    rope = make_rope(SMALL, 140, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        ours, theirs = twin.logits(ids, rope), llama(ids).logits

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    assert theirs.std() > 0.1

    _, folder = saved
    assert sum(p.numel() for p in load_pretrained(QUIRE_TINY).parameters()) == 6_328_576
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("<|doc|>line 48213")["input_ids"]

    assert ids[0] == 2
    assert len(tokenizer("48213")["input_ids"]) == 5
    assert tokenizer.decode(ids[1:]) == "line 48213"


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


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_file(str(QUIRE_TINY / "tokenizer.json"))


@pytest.fixture
def maker(tokenizer):
    return BatchMaker(tokenizer, haystack().text, parse_mixture(Recipe().mixture), seed=3)


def attention_of_the_first_layer(*, structured: bool) -> torch.Tensor:
    config = ModelConfig(num_hidden_layers=1)
    torch.manual_seed(0)
    model = Decoder(config)
    if structured:
        structured_init(model, seed=0)
    ids = torch.randint(3, config.vocab_size, (1, 128), generator=torch.Generator().manual_seed(0))
    rope = make_rope(config, 128, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        query, key, _ = model.blocks[0].project(model.embed(ids), rope)
        return ((query @ key.mT)[0] * config.head_dim**-0.5 + rope.mask).softmax(-1)


def test_structured_init_attends_the_expected_distance_back():
    mass = attention_of_the_first_layer(structured=True)

    for head in range(len(mass)):
        distance = head + 1
        wanted = mass[head].diagonal(-distance)[16:].mean()
        assert wanted >= 0.5, f"head {head} gives {wanted:.2f} to the token {distance} back"
    mass = attention_of_the_first_layer(structured=False)
    assert mass.diagonal(-1, 1, 2)[:, 16:].mean() < 0.1


@pytest.mark.parametrize("shape", [(3, 48, 48), (2, 96, 32), (2, 32, 96)])
def test_orthogonalise_sets_singular_values_to_about_one(shape):
    matrices = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    left, _, right = torch.linalg.svd(matrices, full_matrices=False)
    ours = orthogonalise(matrices)
    turned = left.mT @ ours @ right.mT
    values = turned.diagonal(dim1=1, dim2=2)
    off_diagonal = turned - torch.diag_embed(values)

    assert values.min() > 0.4
    assert values.max() < 1.3
    assert off_diagonal.abs().max() < 0.1
    torch.testing.assert_close(orthogonalise(1000 * matrices), ours, rtol=0.05, atol=0.02)


def test_batches_depend_on_seed_and_step_and_rows_start_a_document(maker, tokenizer):
    stage = Stage(length=96, steps=9, batch_tokens=384)
    maker.batch(0, stage, 0.5)
    second = maker.batch(1, stage, 0.5)
    second_call = maker.batch(1, stage, 0.5)

    assert second.ids.shape == (4, 97)
    assert torch.equal(second.ids, second_call.ids)
    assert torch.equal(second.weights, second_call.weights)
    assert not torch.equal(second.ids, maker.batch(2, stage, 0.5).ids)
    fewer = maker.batch(1, Stage(length=96, steps=9, batch_tokens=192), 0.5)
    assert torch.equal(fewer.ids, second.ids[:2])  # rows are independent of other rows

    batch = maker.batch(0, Stage(length=128, steps=1, batch_tokens=128 * 150), 0.2)
    assert (batch.ids[:, 0] == tokenizer.token_to_id("<|doc|>")).all()
    assert (batch.weights[:, 0] == 0).all()
    assert {KINDS[index] for index in batch.kinds.unique().tolist()} == {*KINDS} - {"longeval"}


def test_stages_are_in_order_and_learning_rates_rise_stay_and_fall():
    plan = parse_plan("64:2:128,128:3:256")

    assert [plan.stage(step).length for step in range(7)] == [64, 64, 128, 128, 128, 128, 128]
    assert plan.steps == 5
    assert plan.stages[1].rows == 2
    for text in ("64:2", "64:2:128,", "64:x:128", "0:2:128"):
        with pytest.raises(ConfigError, match="length:steps:tokens"):
            parse_plan(text)

    factors = [lr_factor(step, 100, warmup_steps=10, decay=0.4) for step in range(100)]

    assert factors[0] == pytest.approx(0.1)
    assert factors[10:60] == [1.0] * 50
    assert factors[80] == pytest.approx(0.5)
    assert factors[99] == pytest.approx(0.025)
    primer = Primer(first=0.7, last=0.1, steps=10)

    assert [round(primer.share(step), 2) for step in (0, 5, 10, 99)] == [0.7, 0.4, 0.1, 0.1]


def test_compressed_books_have_normalized_line_ends(tmp_path):
    text = "<|doc|>\r\n".join(f"book {index}\r\n" + "word " * 500 for index in range(5))
    packed, plain = tmp_path / "books.txt.xz", tmp_path / "books.txt"
    packed.write_bytes(lzma.compress(text.encode()))
    plain.write_bytes(text.encode())
    books = load_books(packed)

    assert books == load_books(plain)
    assert (len(books.train), len(books.held_out)) == (2, 3)
    assert books.train[0].startswith(("book 1\nword", "book 3\nword"))
    assert not set(books.train) & set(books.held_out)
    plain.write_text("word " * 40_000)  # text without marks is split
    assert "".join(split_documents("word " * 40_000)) == "word " * 40_000
    fancy = "\N{LEFT DOUBLE QUOTATION MARK}Caf\N{LATIN SMALL LETTER E WITH ACUTE}\N{EM DASH}"
    assert to_ascii(fancy) == '"Cafe--'


def test_tokenizer_has_single_digits_and_a_document_token(tmp_path):
    train_tokenizer(tmp_path / "tokenizer.json", (haystack().text[:60_000],), 600)
    made = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    ids = made.encode("<|doc|>magic numbers 48213").ids
    assert made.get_vocab_size() == 600
    assert ids[0] == 2
    assert [made.decode([i]) for i in ids[-5:]] == [*"48213"]
    assert made.decode(ids) == "magic numbers 48213"
