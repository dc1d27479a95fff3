"""The papers' items: every table and figure has one, marks follow from differences, runs resume."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.common.result import Chart, Table
from benchmarks.paper.item import (
    NOT_COMPARABLE,
    REPRODUCED,
    SCALED,
    STATUSES,
    Item,
    ItemResult,
    Measured,
    Ours,
    compare,
    mark,
    no_values,
)
from benchmarks.paper.kv_cache_sizes import BANDWIDTH, MEMORY_LAYOUT, MODEL_SIZES, WHEN_IT_MATTERS
from benchmarks.paper.kvpr_figures import FIGURE_8, FIGURE_9, FIGURE_12, FIGURE_14
from benchmarks.paper.kvpr_tables import TABLE_1
from benchmarks.paper.material import Material
from benchmarks.paper.papers import PAPERS, paper_named
from benchmarks.paper.runs import ItemFiles, counts_of, part_of, run_items
from benchmarks.paper.shapes import CONFIGS, config_of, is_shape, shape
from quire.cli.settings import Settings
from quire.errors import ConfigError, InvariantError, UnknownName

PAPER_TABLES = {
    "000": ("table-1", "table-2"),
    "001": (
        *("cache-or-not", "model-sizes", "memory-layout", "size-by-batch", "waste"),
        *("utilization", "block-size", "quantization", "mmlu", "eviction", "bandwidth"),
        *("decode-throughput", "watermark", "swap-or-recompute", "when-it-matters"),
        *("end-to-end", "throughput-stack", "optimized-layout"),
    ),
    "002": ("table-1", "table-2", "table-3", "figure-5", "figure-6", "figure-7", "figure-8"),
    "003": (
        *("table-1", "table-2", "table-3", "table-4", "table-5"),
        *("figure-6", "figure-7", "figure-8", "figure-9", "figure-10"),
        *("figure-12", "figure-13", "figure-14"),
    ),
    "004": ("table-1", "table-2", "figure-5", "figure-6", "figure-7"),
}
"""Every table and figure with measured values; 001 has 11 tables, 5 charts and 2 memory layouts."""

ITEMS = [(paper.id, item) for paper in PAPERS.values() for item in paper.items]
NAMES = [f"{paper}-{item.id}" for paper, item in ITEMS]


@pytest.fixture
def material() -> Material:
    return Material(settings=Settings(), quick=True)


# ---- the list ------------------------------------------------------------------------------------


def test_every_table_and_figure_has_an_item():
    found = {paper.id: {item.id for item in paper.items} for paper in PAPERS.values()}

    assert found == {paper: set(ids) for paper, ids in PAPER_TABLES.items()}
    assert [len(paper.items) for paper in PAPERS.values()] == [2, 18, 7, 13, 5]


@pytest.mark.parametrize(("paper", "item"), ITEMS, ids=NAMES)
def test_item_states_its_rows_status_and_reason(paper: str, item: Item):
    assert item.status in STATUSES
    assert item.reason
    assert item.setting
    assert item.printed
    assert all(len(values) == len(item.columns) for values in item.printed.values())


def test_unknown_paper_is_refused():
    with pytest.raises(UnknownName, match="unknown paper '005'"):
        paper_named("005")


# ---- marks ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paper", "ours", "status", "reason"),
    [
        ((80.0,), Ours(values=(81.0,)), REPRODUCED, "same setting"),
        ((80.0,), Ours(values=(90.0,)), NOT_COMPARABLE, "values differ by over 5%"),
        ((80.0,), Ours(values=(80.0,), differences=("a CPU",)), SCALED, "a CPU"),
        ((80.0,), no_values("no GPU"), NOT_COMPARABLE, "no GPU"),
        (None, Ours(values=(1.0,)), NOT_COMPARABLE, "no such row"),
        ((None,), Ours(values=(1.0,)), NOT_COMPARABLE, "prints no value"),
        (("swap",), Ours(values=("swap",)), REPRODUCED, "same setting"),
        (("swap",), Ours(values=("recompute",)), NOT_COMPARABLE, "differ"),
    ],
)
def test_mark_follows_from_values_and_differences(paper, ours, status, reason):
    found, why = mark(paper, ours, 0.05)

    assert found == status
    assert reason in why


@pytest.mark.parametrize(
    ("printed", "ours", "near"), [(0.4, 0.448, True), (0.4, 0.46, False), (4, 4.4, True)]
)
def test_printed_digits_bound_the_difference_of_small_values(printed, ours, near):
    """0.4 was rounded from a value of 0.35 to 0.45."""
    status, _ = mark((printed,), Ours(values=(ours,)), 0.05)

    assert (status == REPRODUCED) is near


def test_row_without_values_needs_a_reason():
    with pytest.raises(InvariantError, match="expected a reason"):
        mark((1.0,), no_values(""), 0.05)


def item_of(measure, printed=None) -> Item:
    return Item(
        id="table-1",
        title="Table 1",
        setting="a model",
        columns=("s",),
        printed=printed or {"a": (1.0,)},
        measure=measure,
        status=REPRODUCED,
        reason="a formula",
    )


def test_printed_row_without_an_entry_is_refused():
    item = item_of(lambda material: Measured(rows={}))

    with pytest.raises(InvariantError, match=r"every printed row of table-1, got none for \['a'\]"):
        compare(item, item.measure(None), 0.0)


def test_row_with_too_many_values_is_refused():
    item = item_of(lambda material: Measured(rows={"a": Ours(values=(1.0, 2.0))}))

    with pytest.raises(InvariantError, match="expected 1 values"):
        compare(item, item.measure(None), 0.0)


# ---- stored items --------------------------------------------------------------------------------


def counted(calls: list[int]) -> Item:
    table = Table(name="more", caption="More.", columns=("x",), rows=((1,), (None,)))
    chart = Chart(name="line", title="", x_label="", y_label="", lines={"a": ((1, 2.0),)})

    def measure(_material: Material) -> Measured:
        calls.append(1)
        rows = {"a": Ours(values=(1.0,)), "b": Ours(values=(2.0,), differences=("a CPU",))}
        return Measured(rows=rows, tables=(table,), charts=(chart,))

    return item_of(measure)


def test_finished_item_is_read_again_with_equal_options_only(tmp_path: Path, material: Material):
    calls: list[int] = []
    item = counted(calls)

    def run(options: dict) -> list[ItemResult]:
        return list(run_items([item], material, ItemFiles(tmp_path, "000", options)))

    first, again, other = run({"quick": True}), run({"quick": True}), run({"quick": False})
    assert first == again
    assert len(calls) == 2
    assert other[0].rows == first[0].rows
    assert [path.name for path in tmp_path.iterdir()] == ["paper-000-table-1.json"]


@pytest.mark.parametrize("content", ["", "[]", '{"options": {"quick": true}'])
def test_unreadable_file_is_measured_again(tmp_path: Path, material: Material, content: str):
    calls: list[int] = []
    (tmp_path / "paper-000-table-1.json").write_text(content)

    [result] = run_items([counted(calls)], material, ItemFiles(tmp_path, "000", {"quick": True}))

    assert len(calls) == 1
    stored = json.loads((tmp_path / "paper-000-table-1.json").read_text())
    assert ItemResult.from_json(stored["result"]) == result


def test_table_has_both_values_and_numbered_reasons(material: Material):
    [result] = run_items([counted([])], material, ItemFiles(None, "000", {}))

    part = part_of("000", result)
    assert part.tables[0].columns == ("row", "s, paper", "s, here", "mark", "reason")
    assert part.tables[0].rows == (
        ("a", 1.0, 1.0, REPRODUCED, 1),
        ("b", None, 2.0, NOT_COMPARABLE, 2),
    )
    assert part.tables[1].rows[1] == (2, "the paper has no such row; a CPU")
    assert [table.name for table in part.tables] == [
        "paper-000-table-1",
        "paper-000-table-1-reasons",
        "paper-000-table-1-more",
    ]
    assert counts_of([result, result]) == {
        "rows_reproduced": 2,
        "rows_scaled": 0,
        "rows_not_comparable": 2,
    }


# ---- items without a model -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("item", "reproduced"),
    [(BANDWIDTH, 6), (MEMORY_LAYOUT, 2), (WHEN_IT_MATTERS, 6), (MODEL_SIZES, 0), (TABLE_1, 3)],
    ids=lambda value: getattr(value, "id", value),
)
def test_formulas_reproduce_the_printed_rows(item: Item, reproduced: int, material: Material):
    """The article's KV sizes contradict its formula, and KVPR's computation is a memory read."""
    result = compare(item, item.measure(material), 0.0)

    assert result.counts[REPRODUCED] == reproduced


def test_models_have_four_times_the_printed_kv(material: Material):
    result = compare(MODEL_SIZES, MODEL_SIZES.measure(material), 0.0)

    ratios = [row.ours[1] / row.paper[1] for row in result.rows]
    assert ratios == pytest.approx([4] * 7, rel=0.01)


@pytest.mark.parametrize("item", [FIGURE_8, FIGURE_9, FIGURE_12, FIGURE_14], ids=lambda i: i.id)
def test_virtual_clock_rows_are_scaled(item: Item, material: Material):
    result = compare(item, item.measure(material), 0.0)

    printed = [row for row in result.rows if row.paper is not None]
    assert {row.status for row in printed} == {SCALED}
    assert all("virtual clock: A100" in row.reason for row in printed)


def test_cpu_attention_slows_down_with_processes_and_recompute_does_not(material: Material):
    rows = FIGURE_14.measure(material).rows

    host, recompute = zip(*(ours.values for ours in rows.values()), strict=True)
    assert host[0] > 4 * host[-1]
    assert recompute == pytest.approx([recompute[0]] * 4)


def test_sixteen_bit_activations_do_not_pay_with_four_bit_kv(material: Material):
    rows = FIGURE_9.measure(material).rows

    speed_ups = [ours.values[2] for ours in rows.values()]
    assert speed_ups[1] == pytest.approx(1)
    assert min(speed_ups[0], speed_ups[2]) > 1.1


# ---- models --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_shape_is_recognized(name: str):
    spec = shape(name)

    assert is_shape(spec, name)
    assert not is_shape(replace(spec, vocab_size=spec.vocab_size + 1), name)


def test_unknown_shape_and_too_many_layers_are_refused():
    with pytest.raises(UnknownName, match="unknown model shape"):
        shape("llama-9")
    with pytest.raises(ConfigError, match="expected --layers from 1 to 32"):
        config_of("llama-2-7b", 33)


def test_differences_name_model_machine_and_lengths(material: Material):
    found = material.differences("llama-2-13b", "4 V100", ("", "2 samples"))

    assert found[0] == "quire-tiny instead of llama-2-13b"
    assert found[1].endswith("instead of 4 V100")
    assert found[2:] == ("2 samples",)


def test_random_weights_are_no_trained_model():
    settings = Settings(model="random:opt-6.7b")
    material = Material(settings=settings, layers=0, quick=True)

    assert material.random_shape == "opt-6.7b"
    assert material.represents(("opt-13b", "opt-6.7b")) == "opt-6.7b"
    assert material.represents(("opt-13b",)) is None


def test_shared_measurement_runs_once(material: Material):
    calls: list[int] = []

    def measure() -> int:
        calls.append(1)
        return len(calls)

    assert [material.once("a", measure), material.once("a", measure)] == [1, 1]
