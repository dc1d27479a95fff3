"""Models of cases: zoo models, with offloaded or quantized weights, and their codecs' constants."""

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from fuzz.case import Case
from quire.eviction.calibration import measure, read_vectors
from quire.kv.coded_layers import write_constants
from quire.layout.kv_format import fill_plain, read_format
from quire.models import adapter
from quire.models.drafted import with_draft
from quire.models.generation import GenerationDefaults
from quire.models.loader import LoadedModel, load_model, make_decoder
from quire.scheduler.speculation import parse_speculative
from support import zoo
from support.byte_tokenizer import byte_tokenizer
from support.engines import load
from support.streamed import load_streamed

STAY = "stay="
PLAIN = "plain"  # layers that are not packed, as offloaded ones
EOS_TOKEN_ID = 1
LEARNT_FROM = [2 + (i * i + 3 * i) % 61 for i in range(400)]


def model_of(case: Case) -> LoadedModel:
    model = _with_tokenizer(_loaded(case.model, case.weights), case)
    spec = parse_speculative(str(case.schedule.get("speculative", "off")))
    if spec is None or not spec.model:
        return model
    draft = load(spec.model)
    context = replace(draft.spec, max_positions=model.spec.max_positions)
    return with_draft(model, replace(draft, spec=context))


def resident_model_of(case: Case) -> LoadedModel:
    weights = PLAIN if case.weights.startswith(STAY) else case.weights
    return _with_tokenizer(_loaded(case.model, weights), case)


def _with_tokenizer(model: LoadedModel, case: Case) -> LoadedModel:
    if not case.tokenizer:
        return model
    ends = GenerationDefaults(eos_token_ids=(EOS_TOKEN_ID,))
    return replace(model, tokenizer=byte_tokenizer(), generation=ends)


@cache
def _loaded(name: str, weights: str) -> LoadedModel:
    if name == "quire-tiny":
        return load_model(name, dtype="float32", device="cpu", verify=False)
    architecture, _, times = name.partition("*")
    repeated = int(times or 1)
    if weights.startswith(STAY):
        stay, times = int(weights.removeprefix(STAY)), repeated or 3
        streamed = load_streamed(architecture, stay=stay, times=times)
        return replace(streamed, folder=_folder_of(architecture, times))
    if weights == PLAIN:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(adapter, "fastest_products", lambda: None)
            return load(architecture, times=repeated, impl="transformers")
    if not weights:
        return load(architecture, times=repeated)
    decoder = make_decoder(
        zoo.build(architecture, times=repeated), None, impl="auto", codec=weights
    )
    return replace(load(architecture, times=repeated), decoder=decoder, weight_codec=weights)


@cache
def _folder_of(architecture: str, times: int) -> Path:
    """A folder with the model's weights, which identify the prefixes in a tier."""
    folder = Path(tempfile.mkdtemp(prefix="model-"))
    zoo.build(architecture, times=times).save_pretrained(folder)
    return folder


@cache
def constants_of(name: str, codec: str) -> str:
    """A folder with measured constants of a codec, or "" for a codec without."""
    form = read_format(fill_plain(codec, "float32"))
    if not (form.key.constants or form.value.constants):
        return ""
    folder = Path(tempfile.mkdtemp(prefix="constants-"))
    vectors = read_vectors(_loaded(name, "").decoder, LEARNT_FROM)
    write_constants(folder, form, measure(vectors, form), {"model": name})
    return str(folder)
