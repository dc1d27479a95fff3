"""Presses of kvpress on a leaderboard, and the process that runs them, with stand-ins for it."""

import json
import os
import re
import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import DynamicCache
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.kvpress import worker as worker_module
from benchmarks.kvpress.run import (
    CHECKED_PROMPTS,
    KVPRESS,
    SAME_METHOD,
    Pair,
    PressProcess,
    PressRunner,
    chosen_presses,
    entry_of,
    frees_memory,
    pairs_of,
    press_lines,
    removed_of,
    result_of,
    spec_of,
)
from benchmarks.kvpress.worker import Presses, Worker, stored_bytes
from quire.api.llm import LLM
from quire.config.kv_config import KVConfig
from quire.errors import ConfigError
from quire.evals.board.grid import BoardEntry, Grid
from quire.evals.board.pages import chart, page
from quire.evals.board.run import BoardConfig, BoardRunner
from quire.evals.pace import Pace
from quire.evals.suite.cells import CellFolder
from quire.evals.suite.engines import Engines
from quire.evals.suite.registry import task_of
from support import press_stub, zoo

SNAP = {"name": "SnapKVPress", "options": {"window_size": 16}}
TASK, COUNT = "repeats", 3
TESTED = ("KnormPress", "MaskPress", "WrongPress", "RefusedPress")
KV = KVConfig(memory="8MiB")
GRID = Grid(rules=("full",), budgets=("50%", "25%"), schedules=("prefill_end",), codecs=("none",))
SIZES = {"tokens": 200, "count": COUNT, "seeds": (1,), "sanity": False}
CONFIG = BoardConfig(entries=GRID.entries(), tasks=(task_of(TASK),), **SIZES)
ABOUT = {"folder": "model", "gguf_file": None, "dtype": "float32", "device": "cpu", "threads": 1}


@pytest.fixture(scope="module")
def llm():
    opened = LLM("quire-tiny", dtype="float32", device="cpu", kv=KV)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def full(llm, tmp_path_factory):
    """The leaderboard without presses, its prompts, and the runner that made them."""
    stored, engines = CellFolder(tmp_path_factory.mktemp("board")), Engines(lambda kv: llm)
    runner = BoardRunner(engines, KV, CONFIG, identity=(), stored=stored, pace=Pace())
    return runner.run(), runner


def stub(folder: Path, outputs: dict[str, list[int]]) -> Path:
    """A Python of another environment: it runs the stub whatever it is told to run."""
    plan, python = folder / "plan.json", folder / "python"
    plan.write_text(json.dumps({"outputs": outputs, "log": str(folder / "log")}))
    script = Path(press_stub.__file__)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "{plan}"\n')
    python.chmod(0o755)
    return python


def outputs_of(llm, board, runner, *, changed: bool = False) -> dict[str, list[int]]:
    found = {}
    [cells] = board.cells.values()
    for sample, prompt in zip(runner.samples(CONFIG.tasks[0]), cells[0].prompts, strict=True):
        text = "0" if changed else prompt.output
        found[str(llm.encode(sample.prompt))] = llm.encode(text)
    return found


def run_presses(llm, full, folder, python=None):
    """The leaderboard with presses, and what is known about their environment."""
    board, runner = full
    python = python or stub(folder, outputs_of(llm, board, runner))
    with PressProcess(python, ABOUT) as process:
        options = {"grid": GRID, "samples": runner.samples, "identity": ()}
        options |= {"stored": CellFolder(folder), "report": lambda line: None}
        press_runner = PressRunner(process, llm, CONFIG, TESTED, **options)
        found = press_runner.run(board)
        return found, press_runner.about(found)


@pytest.fixture(scope="module")
def pressed(llm, full, tmp_path_factory):
    """The same of working presses, and the folder of their environment."""
    folder = tmp_path_factory.mktemp("pressed")
    return *run_presses(llm, full, folder), folder


def test_presses_are_read_as_nested_texts_and_caps_as_removed_fractions():
    text = "AdaKVPress:press=(SnapKVPress:window_size=16),alpha_safeguard=0.5,a=true,b=key"

    assert spec_of(text) == {
        "name": "AdaKVPress",
        "options": {"press": SNAP, "alpha_safeguard": 0.5, "a": True, "b": "key"},
    }
    assert all(spec_of(text)["name"] for text in SAME_METHOD.values())
    for text in ("Snap KV", "SnapKVPress:window_size", "A:press=(B:(c=1)"):
        with pytest.raises(ConfigError, match=r"expected|parentheses"):
            chosen_presses(text, ("25%",))

    assert removed_of("25%") == 0.75
    assert str(entry_of("KnormPress", "25%", "prefill_end")) == "kvpress/KnormPress 25% prefill_end"
    for budget in ("64", "0%", "2MiB", "101%", "x%"):
        with pytest.raises(ConfigError, match=f"fractions of the prompt.*{budget!r}"):
            chosen_presses("KnormPress", (budget,))
    reason = r"got .*: ModuleNotFoundError: No module named 'kvpress'"
    with pytest.raises(ConfigError, match=reason):
        PressProcess(Path(sys.executable), ABOUT)


def test_presses_become_rows_and_those_that_differ_at_ratio_0_are_refused(pressed):
    board, _, folder = pressed
    result = result_of(board)
    rows = {(row.entry.rule, row.entry.budget): row for row in result.rows}
    found = {f"{rule} {budget}" for rule, budget in rows if rule != "full"}
    assert found == {f"{KVPRESS}/{n}Press {b}" for n in ("Knorm", "Mask") for b in ("50%", "25%")}
    row, masked = rows[f"{KVPRESS}/KnormPress", "25%"], rows[f"{KVPRESS}/MaskPress", "25%"]
    assert (row.visible, masked.visible) == (0.25, 0.25)
    assert row.quality.mean == 0.0  # the stub's output for a removed token is wrong
    assert frees_memory(row)
    assert not frees_memory(masked)
    assert not frees_memory(result.reference)
    wrong, refused = (f"{KVPRESS}/{n}Press 50%,25% prefill_end" for n in ("Wrong", "Refused"))
    assert {str(key): why for key, why in board.refused.items()} == {
        wrong: "at a compression ratio of 0 its scores of repeats are not full KV's",
        refused: "AssertionError: too short",
    }
    assert (folder / "log").read_text().splitlines()[:3] == [
        f" 0.0 prefill_end {COUNT}",
        f"KnormPress 0.0 prefill_end {CHECKED_PROMPTS}",
        f"KnormPress 0.5 prefill_end {COUNT}",
    ]


def test_environment_with_other_scores_than_full_kv_is_refused(llm, full, tmp_path):
    python = stub(tmp_path, outputs_of(llm, *full, changed=True))
    with pytest.raises(ConfigError, match=r"task 'repeats' as full KV does \(1\), got 0 without"):
        run_presses(llm, full, tmp_path, python)


def test_pages_show_which_presses_free_memory_and_compare_rules(pressed):
    board, about, _ = pressed
    result = result_of(board)
    section = list(press_lines(result.rows, about))
    text = page(result, "quire-tiny", has_chart=False, section=section)

    section = text[text.index("## Presses of kvpress") : text.index("## All entries")]
    assert "another environment (kvpress 0)" in section
    assert "* set a threshold, not a budget: `DMSPress`" in section
    [knorm] = [line for line in section.splitlines() if line.startswith("| `KnormPress` | 25%")]
    [mask] = [line for line in section.splitlines() if line.startswith("| `MaskPress` | 25%")]
    assert knorm.endswith("| 0.250 | yes |")
    assert mask.endswith("| 0.250 | no |")
    assert "| `kvpress/KnormPress` | 25% | prefill_end | `none` | 0.000" in text
    assert b"kvpress, prefill_end" in chart(result)

    assert "The same method" not in section


def test_rules_are_compared_with_the_presses_of_their_method_prompt_by_prompt(pressed):
    board, about, _ = pressed
    [full] = board.cells[CONFIG.reference]
    [knorm] = board.cells[entry_of("KnormPress", "50%", "prefill_end")]
    others = {
        BoardEntry(rule, "50%", when, codec): [full] * 3  # of three tasks
        for rule, when, codec in (
            ("knorm", "prefill_end", "none"),
            ("knorm", "decode", "none"),  # another schedule
            ("knorm", "prefill_end", "int8"),
            ("tova", "prefill_end", "none"),  # its press did not run
        )
    }
    others[entry_of("KnormPress", "50%", "prefill_end")] = [knorm] * 3
    mixed = replace(knorm, prompts=(*knorm.prompts[:1], *full.prompts[1:]))
    others[BoardEntry("knorm", "25%", "prefill_end", "none")] = [mixed]

    pairs = pairs_of(replace(board, cells={**board.cells, **others}))

    found = {one.budget: (one.quality, one.press_quality, one.equal) for one in pairs}
    assert found == {"50%": (1.0, 0.0, 0), "25%": (pytest.approx(2 / 3), 0.0, 1)}
    assert pairs[0].difference.low > 0
    assert pairs[1].difference.low <= 0 < pairs[1].difference.mean
    assert Pair.stored(json.loads(json.dumps(asdict(pairs[0])))) == pairs[0]
    text = "\n".join(press_lines([], replace(about, pairs=pairs)))
    assert "1 of 2 intervals do not contain 0" in text
    assert "| `knorm` | `KnormPress` | 50% | 1.000 | 0.000 | +1.000 (" in text


SMALL = """kvpress quire-tiny --kv-memory 8MiB --dtype float32 --tasks repeats --budgets 50%
    --rules knorm --schedules prefill_end --num-prompts 3 --seeds 1 --tokens 200 --json"""


def invoke(*arguments):
    return CliRunner().invoke(app, [*SMALL.split(), *map(str, arguments)])


def test_the_command_writes_rows_that_a_leaderboard_takes(llm, full, tmp_path):
    python = stub(tmp_path, outputs_of(llm, *full))

    run = invoke("--python", python, "--presses", "KnormPress", "--out", tmp_path / "out")

    assert run.exit_code == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    assert result["claims"] == {"kvpress_entries": 1, "pairs": 1}
    assert result["arms"]["presses"]["versions"] == {"kvpress": "0"}
    stored = json.loads((tmp_path / "out" / "kvpress.json").read_text(encoding="utf-8"))
    assert stored["arms"] == result["arms"]


KVPRESS_PYTHON = os.environ.get("QUIRE_KVPRESS_PYTHON")
REAL = "KnormPress;AdaKVPress:press=(KeyDiffPress);SnapKVPress:window_size=16;NopePress"


@pytest.mark.slow
@pytest.mark.skipif(KVPRESS_PYTHON is None, reason="QUIRE_KVPRESS_PYTHON is not set")
def test_presses_of_kvpress_become_rows(tmp_path):
    schedules = ("--schedules", "prefill_end,prefill_and_decode")
    run = invoke("--python", KVPRESS_PYTHON, "--presses", REAL, *schedules, "--out", tmp_path)

    assert run.exit_code == 0, run.stderr
    result = json.loads(run.stdout.splitlines()[-1])
    found = [row for row in result["arms"]["rows"] if row["entry"]["source"] == "kvpress"]
    rows = {(row["entry"]["rule"], row["entry"]["schedule"]): row for row in found}
    knorm = rows["kvpress/KnormPress", "prefill_end"]
    masks = rows["kvpress/AdaKVPress:press=(KeyDiffPress)", "prefill_end"]
    assert ("kvpress/KnormPress", "prefill_and_decode") in rows
    assert result["claims"]["kvpress_entries"] == len(rows) == 5
    assert knorm["visible"] == pytest.approx(0.5, abs=0.01) == masks["visible"]
    assert knorm["retained_share"] < 0.55 < masks["retained_share"]
    refused = " ".join(result["arms"]["refused"].values())
    assert "ValueError: this version of kvpress has no press 'NopePress'" in refused
    assert "AssertionError: Query length 1 should be greater than the window size 16" in refused


PROMPT = list(range(3, 15))


def cache_of(kwargs):
    """The cache of a layer's arguments, whose name depends on the version of Transformers."""
    return kwargs.get("past_key_values", kwargs.get("cache"))


class BasePress:
    """Keeps the last keys of each layer in the prefill."""

    def __init__(self, compression_ratio: float = 0.0) -> None:
        self.compression_ratio = compression_ratio

    def kept(self, length: int) -> int:
        return int(length * (1 - self.compression_ratio))

    def stored(self, last: torch.Tensor) -> torch.Tensor:
        return last.clone()

    def hook(self, module, inputs, kwargs, output):
        layer = cache_of(kwargs).layers[module.layer_idx]
        kept = self.kept(layer.keys.shape[2])
        layer.keys = self.stored(layer.keys[:, :, -kept:])
        layer.values = self.stored(layer.values[:, :, -kept:])
        return output

    @contextmanager
    def __call__(self, model):
        hooks = [
            layer.self_attn.register_forward_hook(self.hook, with_kwargs=True)
            for layer in model.model.layers
        ]
        yield
        for hook in hooks:
            hook.remove()


class ViewPress(BasePress):
    """The same, but holds the memory of all keys."""

    def stored(self, last: torch.Tensor) -> torch.Tensor:
        return last


class MaskPress(BasePress):
    """Marks keys in the way of kvpress, and removes none."""

    def hook(self, module, inputs, kwargs, output):
        masked = len(PROMPT) - self.kept(len(PROMPT))
        module.masked_key_indices = (torch.zeros(masked), torch.zeros(masked), torch.zeros(masked))
        return output


class KeyRerotationPress(BasePress):
    compression_ratio = 0.0

    def __init__(self, press: BasePress) -> None:
        super().__init__()
        self.press = press


@dataclass
class DecodingPress(BasePress):
    """Keeps the last keys after every token."""

    base_press: BasePress
    compression_interval: int = 512
    target_size: int = 2048

    def kept(self, length: int) -> int:
        return min(self.target_size, length)


CLASSES = (BasePress, ViewPress, MaskPress, KeyRerotationPress, DecodingPress)
STUB = SimpleNamespace(version="1", **{press.__name__: press for press in CLASSES})


def spec(name, **options):
    return {"name": name, "options": options}


@pytest.fixture(scope="module")
def model():
    return zoo.build("llama").float().eval()


@pytest.fixture(scope="module")
def worker(model):
    texts = SimpleNamespace(decode=lambda ids, **options: " ".join(map(str, ids)))
    return Worker(Presses(STUB), model, texts)


def job(press, removed=0.5, schedule="prefill_end", *, max_tokens=4):
    request = {"token_ids": PROMPT, "question_tokens": 0, "max_tokens": max_tokens, "stop": []}
    ids = {"eos_token_ids": [], "undecodable_ids": [], "requests": [request]}
    return {"press": press, "removed": removed, "schedule": schedule, **ids}


def output(worker, *arguments, **options):
    [found] = worker.run(job(*arguments, **options))["outputs"]
    return found


def token_bytes(model):
    cache = DynamicCache()
    model(torch.tensor([PROMPT]), past_key_values=cache)
    return stored_bytes(cache) // len(PROMPT)


def test_without_a_press_outputs_are_those_of_transformers(worker, model):
    options = {"do_sample": False, "max_new_tokens": 4, "eos_token_id": None}
    expected = model.generate(torch.tensor([PROMPT]), **options)

    found = output(worker, None, 0.0)

    source = Path(worker_module.__file__).read_text(encoding="utf-8")
    assert not re.search(r"^ *(from|import) (quire|benchmarks)", source, re.MULTILINE)
    assert found["token_ids"] == expected[0, len(PROMPT) :].tolist()
    assert found["visible"] == 1.0
    assert found["retained_bytes"] == token_bytes(model) * len(PROMPT)
    assert found["peak_bytes"] == token_bytes(model) * (len(PROMPT) + 3)


def test_presses_that_free_or_mask_have_their_bytes_and_visible_keys(worker, model):
    found = output(worker, spec("ViewPress"))
    freed = output(worker, spec("KeyRerotationPress", press=spec("ViewPress")), 0.5)

    all_bytes = token_bytes(model) * len(PROMPT)
    assert found["retained_bytes"] == all_bytes  # a view holds the memory of all keys
    assert found["visible"] == freed["visible"] == 0.5
    kept = token_bytes(model) * len(PROMPT) // 2
    layers = len(model.model.layers)
    base = SimpleNamespace(**vars(STUB), KeepPress=type("KeepPress", (BasePress,), {}))
    found = output(Worker(Presses(base), model, None), spec("KeepPress"), max_tokens=1)
    assert found["retained_bytes"] == kept
    assert found["peak_bytes"] == kept + (all_bytes - kept) // layers

    found = output(worker, spec("MaskPress"))

    assert found["retained_bytes"] == token_bytes(model) * len(PROMPT)
    heads = model.config.num_key_value_heads
    assert found["visible"] == pytest.approx(1 - 0.5 / heads)
    assert output(worker, None, 0.0)["visible"] == 1.0


def test_tokens_after_the_prompt_follow_it_unless_keys_are_rerotated(worker, model):
    seen = []

    def position(module, arguments, kwargs):
        seen.append(kwargs["position_ids"].flatten().tolist())

    hook = model.register_forward_pre_hook(position, with_kwargs=True)
    output(worker, spec("ViewPress"), max_tokens=3)
    output(worker, spec("KeyRerotationPress", press=spec("ViewPress")), max_tokens=3)
    hook.remove()

    n = len(PROMPT)
    assert seen == [list(range(n)), [n], [n + 1], list(range(n)), [n // 2], [n // 2 + 1]]


def test_decoding_press_keeps_the_cap_of_the_prompt_after_every_token(worker, model):
    both = output(worker, spec("ViewPress"), schedule="prefill_and_decode")
    decode = output(worker, spec("ViewPress"), schedule="decode")
    presses = Presses(STUB).of(spec("ViewPress"), job(None, 0.75), 12)
    pressed = Presses(STUB).of(spec("ViewPress"), job(None, 0.75, "prefill_and_decode"), 12)
    nothing = Presses(STUB).of(spec("ViewPress"), job(None, 0.0, "prefill_and_decode"), 12)

    assert both["visible"] == 0.5
    assert decode["visible"] == 1.0
    assert (presses.prefill.compression_ratio, presses.decode) == (0.75, None)
    assert (pressed.decode.target_size, pressed.decode.compression_interval) == (3, 1)
    assert pressed.decode.base_press.compression_ratio == 0.0
    assert nothing.decode.target_size == 12 + 4
