import gc
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from quire.models.adapter import TransformersDecoder
from quire.models.loader import LoadedModel, load_model
from quire.models.native_linear import PackedLinear, available_products
from quire.models.packing import MappedFiles
from quire.models.weights import weight_bytes
from support import zoo
from support.load_memory import RESET, LoadMemory, measure_loads

MIB = 1 << 20
LARGEST_LAYER = 8 * MIB  # the gated MLP and the attention of a layer, or the head
SLACK = 4 * MIB  # modules, tables, allocator
LOADS = (
    *(("native", "auto", "auto"), ("native", "int4", "float32")),
    *(("transformers", "auto", "float32"), ("transformers", "int4", "auto")),
)
"""Implementation, weight codec, and dtype of the activations."""

pytestmark = pytest.mark.skipif(
    available_products() is None, reason="no C extension with vector instructions"
)
needs_proc = pytest.mark.skipif(not RESET.exists(), reason="no /proc with resident memory")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 54 MiB in bfloat16."""
    config = LlamaConfig(
        vocab_size=8_192, hidden_size=512, intermediate_size=1_536, num_hidden_layers=6,
        num_attention_heads=8, num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("memory")
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    load_model("quire-tiny", device="cpu")  # code and tables of the first load
    return folder


def live_tensor_bytes() -> int:
    gc.collect()
    kinds = torch.Tensor, torch.nn.Parameter
    tensors = [x for x in gc.get_objects() if type(x) in kinds and x.device.type == "cpu"]
    total = last = 0
    for start, end in sorted((x.data_ptr(), x.data_ptr() + x.nbytes) for x in tensors):
        total += max(0, end - max(start, last))
        last = max(last, end)
    return total


def load(folder: Path, impl: str, codec: str, dtype: str = "auto") -> LoadedModel:
    return load_model(
        folder, device="cpu", dtype=dtype, model_impl=impl, weight_codec=codec, verify=False
    )


@pytest.mark.parametrize(
    ("impl", "codec"),
    [
        *(("native", "auto"), ("native", "int8"), ("transformers", "int4")),
        pytest.param("native", "int4", marks=pytest.mark.slow),
        pytest.param("transformers", "auto", marks=pytest.mark.slow),
        pytest.param("transformers", "int8", marks=pytest.mark.slow),
    ],
)
def test_weight_bytes_are_those_of_live_tensors_and_of_the_codec(folder, impl, codec):
    before = live_tensor_bytes()
    loaded = load(folder, impl, codec)
    added = live_tensor_bytes() - before

    assert loaded.weight_bytes == pytest.approx(added, abs=MIB)
    head = loaded.spec.embedding_parameters
    layers = loaded.spec.num_parameters - 2 * head
    bits = {"auto": 16, "int8": 8, "int4": 4 + 32 / 128}[codec]  # with scales of 128 weights
    expected = head * 16 + layers * bits + head * min(16, max(8, bits))
    assert loaded.weight_bytes == pytest.approx(expected / 8, rel=0.01)


@pytest.fixture(scope="module")
def loads(folder: Path) -> Mapping[tuple[str, str, str], LoadMemory]:
    return dict(zip(LOADS, measure_loads(folder, LOADS), strict=True))


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("case", LOADS, ids="-".join)
def test_peak_while_loading_is_one_model_and_one_layer(loads, case):
    found = loads[case]
    stored, float32 = found.stored_bytes, case[2] == "float32"
    model = stored * (2 if float32 else 1)
    files = stored if float32 else 0  # mapped pages that Transformers converts
    assert found.added_bytes < found.weight_bytes + SLACK
    assert found.peak_bytes < model + files + (LARGEST_LAYER + SLACK) * (model // stored)


@needs_proc
@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_no_weight_file_stays_mapped(folder: Path, impl: str) -> None:
    loaded = load(folder, impl, "int8")
    assert isinstance(loaded.decoder, TransformersDecoder)
    assert str(folder) not in Path("/proc/self/maps").read_text()


@pytest.mark.parametrize("name", ["llama", "llama_mqa", "gpt2", "mixtral", "gpt_oss"])
@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_panels_scales_and_biases_are_weight_bytes(name: str, codec: str) -> None:
    model = TransformersDecoder(zoo.build(name), codec=codec).model
    layers = [module for module in model.modules() if isinstance(module, PackedLinear)]
    own = sum(tensor.nbytes for layer in layers for tensor in layer.product.tensors)
    rest = sum(each.nbytes for each in (*model.parameters(), *model.buffers()))
    assert weight_bytes(model) == own + rest


@needs_proc
def test_pages_of_a_mapped_file_are_read_again_after_their_release(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    numbers = torch.arange(1 << 18, dtype=torch.int32)
    path.write_bytes(numbers.numpy().tobytes())
    mapped = torch.from_file(str(path), size=len(numbers), dtype=torch.int32)
    files = MappedFiles()

    assert files.hold(mapped)
    assert not files.hold(numbers)
    assert int(mapped.sum()) == int(numbers.sum())
    files.release_pages([mapped[1000:-1000], numbers])
    assert torch.equal(mapped, numbers)
