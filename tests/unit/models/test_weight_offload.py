import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from quire.errors import ConfigError, StorageError, UnsupportedModel
from quire.models.adapter import LayerMajor
from quire.models.layer_source import decoder_layers
from quire.models.weights import weight_bytes
from quire.offload.swap.transfer import ThreadTransferWorker
from quire.offload.weights.links import ALIGNMENT_BYTES, CudaLink, FileLink, layer_weights
from quire.offload.weights.placement import WeightStream, WithinBudget
from quire.plan.weights import SLOTS, place_weights
from support import zoo
from support.engines import load
from support.streamed import DelayedTransfers, load_streamed, min_bytes, poison

CPU = torch.device("cpu")


class Layers(nn.Module):
    def __init__(self, count: int, width: int = 8) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(count))
        for number, layer in enumerate(self.layers):
            layer.layer_idx = number

    def forward(self, rows):
        for layer in self.layers:
            rows = layer(rows)
        return rows


def streamed(count: int, offloaded_layers: tuple[int, ...] | None = None, transfer_worker=None):
    """A model with offloaded layers, its weight stream, and the same model without offloading."""
    model, plain = Layers(count), Layers(count)
    layers = layer_weights(model, count)
    numbers = tuple(range(count)) if offloaded_layers is None else offloaded_layers
    place = place_weights([layer.num_bytes for layer in layers], 0, None)
    place = replace(place, offloaded_layers=numbers)
    link = FileLink(place.host_bytes, transfer_worker or DelayedTransfers())
    poison(link)
    for number in numbers:
        link.store(number, layers[number])
    link.open(SLOTS, place.slot_bytes)
    return model, WeightStream(layers, place, link), plain


@pytest.fixture
def rows():
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", zoo.ARCHITECTURES)
def test_layers_are_found_in_every_architecture(name):
    model = zoo.build(name)
    count = model.config.num_hidden_layers
    layers = layer_weights(model, count)

    assert len(layers) == count
    held = {id(h.parameter) for layer in layers for h in layer.held}
    outside = [n for n, p in model.named_parameters() if id(p) not in held]
    assert outside
    assert not any("layers." in name or ".h." in name for name in outside)
    for layer in layers:
        assert all(h.start % ALIGNMENT_BYTES == 0 for h in layer.held)
        assert sum(h.num_bytes for h in layer.held) <= layer.num_bytes


def test_shared_weights_belong_to_no_layer():
    model = Layers(4)
    head = model.head = nn.Linear(8, 8)
    head.weight = model.layers[1].weight
    model.layers[3].bias = model.layers[2].bias

    num_held = [len(layer.held) for layer in layer_weights(model, 4)]
    assert num_held == [2, 1, 1, 1]
    with pytest.raises(UnsupportedModel, match="leave out --weights-memory"):
        decoder_layers(nn.Linear(2, 2), 2)  # has no list of layers


@pytest.mark.parametrize("name", ["gpt2", "llama_mqa", "mixtral"])
def test_smallest_budget_is_accepted_and_one_byte_less_is_refused(name, monkeypatch, tmp_path):
    least, _ = min_bytes(name)
    model = zoo.build(name, times=3)
    before, options = weight_bytes(model), {"dtype": torch.float32, "trust_remote_code": False}
    with pytest.raises(ConfigError, match=f"at least {least:,} B"):
        WithinBudget(least - 1).check(model.config, **options)
    with pytest.raises(ConfigError, match=f"at least {least:,} B"):
        WithinBudget(least - 1).place(model, CPU)
    assert weight_bytes(model) == before

    WithinBudget(least).check(model.config, **options)
    place, weights = WithinBudget(least).place(model, CPU)
    assert weights is not None
    assert place.device_bytes == least
    slots = sum(slot.numel() for slot in weights.link.slots)
    assert weight_bytes(model) + slots == least  # offloaded weights use no device memory
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        FileLink(1 << 60)  # the disk is full


@pytest.mark.parametrize(
    "offloaded_layers", [(0, 1, 2), (1, 2, 4, 6), (0, 2, 3, 5, 6), tuple(range(7))]
)
def test_passes_equal_the_model_and_transfer_each_layer_once(offloaded_layers, rows):
    """Includes layer counts that are not a multiple of the slots."""
    model, weights, plain = streamed(7, offloaded_layers)
    for passes in range(1, 6):
        assert torch.equal(model(rows), plain(rows))
        assert weights.passes.num_passes == passes
        assert not weights.passes.pending
        num_copies = passes * len(offloaded_layers) + SLOTS  # those for the next pass
        assert weights.link.transfer_worker.num_copies == num_copies
    assert all(not model.layers[number].weight.numel() for number in offloaded_layers)


def test_layers_run_in_any_order_also_after_an_interrupted_pass(rows):
    model, _, plain = streamed(6, (0, 1, 3, 4))
    for order in ([3], [5, 4, 3], [0, 1], [1, 0], [2, 4, 0, 3]):
        for number in order:
            assert torch.equal(model.layers[number](rows), plain.layers[number](rows))
    assert torch.equal(model(rows), plain(rows))

    model, _, plain = streamed(6)
    handle = model.layers[3].register_forward_pre_hook(lambda *_: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        model(rows)
    handle.remove()
    assert torch.equal(model(rows), plain(rows))


@pytest.mark.parametrize("at", range(9))
def test_failed_transfer_raises_and_is_retried(at, rows):
    transfer_worker = DelayedTransfers()
    transfer_worker.fails = {at: OSError("lost")}
    model, _, plain = streamed(5, transfer_worker=transfer_worker)
    results = []
    for _ in range(3):
        try:
            results.append(torch.equal(model(rows), plain(rows)))
        except StorageError as error:
            assert "could not be transferred: lost" in str(error)  # noqa: PT017
            results.append(None)

    assert sorted(results, key=bool) == [None, True, True]


def test_truncated_file_raises_instead_of_using_stale_weights(rows):
    model, weights, plain = streamed(5)
    assert torch.equal(model(rows), plain(rows))
    weights.link.finalize()
    weights.link._file.truncate(100)
    with pytest.raises(StorageError, match="too early"):
        model(rows)  # the first two layers are in the slots


class LayerMajorForwards:
    """Forwards over four layers that record the order of their layers."""

    def __init__(self, count: int) -> None:
        self.model, self.seen, self.entered = Layers(4), [], -1
        self.major = LayerMajor(list(self.model.layers), CPU)
        self.alive = self.max_alive = 0
        for layer in self.model.layers:
            layer.register_forward_pre_hook(self._note)
        self.functions = [self._forward(number) for number in range(count)]

    def enter(self, number):
        self.entered = number

    def _note(self, module, _args):
        self.seen.append((module.layer_idx, self.entered))

    def _forward(self, number):
        def forward():
            assert torch.is_inference_mode_enabled() is False
            out = self.model(torch.full((1, 8), float(number)))
            self.seen.append(("end", self.entered))
            return out

        return forward


@pytest.mark.parametrize("count", [1, 2, 5])
def test_each_layer_runs_for_all_forwards_before_the_next(count):
    forwards = LayerMajorForwards(count)
    for _ in range(2):
        forwards.seen.clear()
        results = forwards.major.run(forwards.functions, forwards.enter)

        layers = [(layer, number) for layer in range(3) for number in range(count)]
        last = [(what, number) for number in range(count) for what in (3, "end")]
        assert forwards.seen == layers + last
        for number, result in enumerate(results):
            assert torch.equal(result, forwards.model(torch.full((1, 8), float(number))))


@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("layer", [0, 2, 3])
def test_failed_forward_stops_all_and_the_next_run_succeeds(layer, number):
    forwards = LayerMajorForwards(3)

    def stop(*_):
        if forwards.entered == number:
            raise KeyError(number)

    handle = forwards.model.layers[layer].register_forward_pre_hook(stop)
    with pytest.raises(KeyError, match=str(number)):
        forwards.major.run(forwards.functions, forwards.enter)
    handle.remove()

    assert len(forwards.major.run(forwards.functions, forwards.enter)) == 3
    forwards.model(torch.zeros(1, 8))  # a single forward does not wait


def test_forwards_do_not_run_concurrently():
    forwards, running, most = LayerMajorForwards(4), set(), []
    lock = threading.Lock()

    def begin(module, _args):
        with lock:
            running.add(threading.get_ident())
            most.append(len(running))

    def end(module, _args, _out):
        with lock:
            running.discard(threading.get_ident())

    for layer in forwards.model.layers:
        layer.register_forward_pre_hook(begin)
        layer.register_forward_hook(end)
    forwards.major.run(forwards.functions, forwards.enter)

    assert max(most) == 1


class HeldBack(ThreadTransferWorker):
    """Holds every second copy back: that of the weights after W_K and W_V."""

    def __init__(self):
        super().__init__()
        self.may_end, self.num_copies = threading.Event(), 0

    def submit(self, copy, num_bytes):
        is_rest, self.num_copies = self.num_copies % 2, self.num_copies + 1
        return super().submit(lambda: (not is_rest or self.may_end.wait(10)) and copy(), num_bytes)


@pytest.mark.parametrize("name", ["llama", "gpt2", "qwen3"])
def test_keys_are_computed_while_the_other_weights_are_in_transfer(name):
    plain = load(name, times=3, impl="transformers").decoder
    model = load_streamed(name)
    decoder, inputs = model.decoder, torch.randn(5, plain.spec.hidden_size)
    positions = torch.arange(5)
    assert decoder.prepare_recomputation() is plain.prepare_recomputation() is None
    model.weights.arrive(0)  # the slots hold layers 0 and 1 then
    model.weights.link.finalize()
    worker = model.weights.link.transfer_worker = HeldBack()
    layer = 3

    found = decoder.keys_and_values(layer, inputs, positions)

    assert worker.num_copies == 4  # of layers 3 and 4
    module = model.weights.modules[layer]
    assert any(not parameter.numel() for parameter in module.parameters())
    worker.may_end.set()
    model.weights.arrive(layer)
    assert all(parameter.numel() for parameter in module.parameters())
    expected = plain.keys_and_values(layer, inputs, positions)
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-5


@pytest.mark.gpu
def test_cuda_stream_waits_for_late_transfers(rows):
    device = torch.device("cuda")
    model, plain = Layers(7, 2048), Layers(7, 2048).to(device)
    layers = layer_weights(model, 7)
    place = place_weights([w.num_bytes for w in layers], 0, SLOTS * layers[0].num_bytes)
    link = CudaLink(device)
    for number in place.offloaded_layers:
        link.store(number, layers[number])
    model.to(device)
    link.open(SLOTS, place.slot_bytes)
    prefetch = link.prefetch

    def late_prefetch(layer, slot):
        with torch.cuda.stream(link._stream):
            link._stream.wait_event(link._released[slot])
            link.slots[slot].fill_(0xFF)
            torch.cuda._sleep(2_000_000)
        prefetch(layer, slot)

    link.prefetch = late_prefetch
    weights = WeightStream(layers, place, link)
    inputs = torch.randn(4, 2048, device=device)
    with torch.inference_mode():
        results = [model(inputs) for _ in range(5)]
        assert all(torch.equal(result, plain(inputs)) for result in results)
    torch.cuda.current_stream().synchronize()
    weights.link._note()
    assert weights.device_s > 0
    assert weights.link.copied_s > 0
    assert weights.num_bytes >= 5 * place.host_bytes
