"""Initial preemption costs: stored costs, or assumed costs if none are stored."""

from dataclasses import replace
from pathlib import Path

import pytest

from quire.layout.model import ExtraSpec, ModelSpec
from quire.plan.ceilings import (
    Ceilings,
    Machine,
    NotUsable,
    ProductRate,
    read_ceilings,
    write_ceilings,
)
from quire.plan.preemption_costs import (
    ASSUMED_COPY,
    ASSUMED_FLOPS_PER_S,
    assumed_prefill,
    known_costs,
)
from quire.plan.rates import CopyRate, CopyRates, PrefillRates, model_key
from support.model_specs import CACHE_KINDS

MODEL = ModelSpec.from_config(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
    }
)
HERE = Machine(cpu="a processor", threads=2, torch="2.13.0")
COPIES = CopyRates(
    out=CopyRate(bytes_per_s=5e9, call_s=1e-5, piece_s=1e-6), back=CopyRate(bytes_per_s=4e9)
)
PREFILL = PrefillRates(token_s=1e-5, square_s=1e-9, call_s=1e-3)
STORED = Ceilings(
    machine=HERE,
    read_bytes_per_s=20e9,
    copy_bytes_per_s=10e9,
    products=(ProductRate(dtype="bfloat16", rows=64, inner=64, columns=128, flops_per_s=1e11),),
    copies={"cpu": COPIES},
    prefill={model_key(MODEL, dtype="bfloat16", device="cpu"): PREFILL},
)


def costs(found, **changes):
    options = {"dtype": "bfloat16", "device": "cpu", "chunk_tokens": 256} | changes
    return known_costs(found, MODEL, **options)


def test_stored_costs_are_used(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    write_ceilings(STORED, path)

    known = costs(read_ceilings(path, HERE))

    assert (known.costs.copies, known.costs.prefill) == (COPIES, PREFILL)
    assert known.costs.chunk_tokens == 256
    assert known.notice == ""


def test_costs_of_another_machine_are_assumed_with_a_notice(tmp_path: Path):
    path = tmp_path / "ceilings.json"
    write_ceilings(STORED, path)

    known = costs(read_ceilings(path, replace(HERE, threads=1)))

    assert known.costs.copies.out == known.costs.copies.back == ASSUMED_COPY
    assert known.costs.prefill == assumed_prefill(MODEL, ASSUMED_FLOPS_PER_S)
    assert "assumed at first" in known.notice
    assert "measured with threads 2, not 1: run `quire profile MODEL`" in known.notice


def test_missing_file_gives_a_notice():
    known = costs(NotUsable("ceilings.json does not exist: run `quire profile MODEL`"))

    assert "does not exist" in known.notice


def test_file_without_copy_rates_gives_its_product_rates():
    known = costs(replace(STORED, copies={}, prefill={}))

    assert known.costs.copies.out == ASSUMED_COPY
    assert known.costs.prefill == assumed_prefill(MODEL, 1e11)
    assert "copies with cpu were not measured" in known.notice
    assert "`quire profile MODEL`" in known.notice


@pytest.mark.parametrize("changes", [{"dtype": "float16"}, {"device": "a card"}], ids=str)
def test_rates_of_another_dtype_or_device_are_not_used(changes):
    known = costs(STORED, **changes)

    assert known.costs.prefill != PREFILL
    assert known.notice


def test_assumed_prefill_rates_of_latents_are_those_of_expanded_heads():
    """Two layers, 4 heads with keys of 20 and values of 16, of latents of 32 + 8."""
    found = assumed_prefill(CACHE_KINDS["latent"], 1e9)

    assert found.square_s == pytest.approx(2 * 4 * (20 + 16) / 1e9)


def test_assumed_prefill_rates_of_a_small_model():
    """Two layers: q and o 64 x 64, k and v 64 x 32, MLP 3 x 64 x 128: 36,864 weights each.

    73,728 weights and 5 norms of 64; 2 FLOP a weight. Attention: 2 * 2 layers * 64 = 256.
    """
    rates = assumed_prefill(MODEL, 1e9)

    assert rates.token_s == pytest.approx(2 * 73_728 / 1e9, rel=0.01)
    assert rates.square_s == pytest.approx(256 / 1e9)


def test_model_key_names_shape_dtype_and_device():
    key = model_key(MODEL, dtype="bfloat16", device="cpu")

    assert key.startswith("llama, 2 layers of 64, ")
    assert key.endswith(" parameters, bfloat16, cpu")


def test_assumed_prefill_counts_the_heads_of_every_layer_and_no_lookup_tables():
    """Attention of 4 query heads: 2 x 16 numbers in two layers, 2 x 32 in the wide one."""
    model = CACHE_KINDS["by_layer"]
    rows = replace(model, extra=ExtraSpec(layer_vocab=1000, layer_width=2))
    weights = model.num_parameters - 2 * model.embedding_parameters

    rates, with_rows = (assumed_prefill(each, 1e9) for each in (model, rows))
    assert rates.square_s == pytest.approx(4 * (16 + 16 + 64) / 1e9)
    assert rates.token_s == pytest.approx(2 * weights / 1e9)
    own = rows.num_parameters - model.num_parameters - 3 * 1000 * 2
    assert with_rows.token_s == pytest.approx(2 * (weights + own) / 1e9)
