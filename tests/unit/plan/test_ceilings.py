"""Stored ceilings: interpolation between measured points, and files that cannot be used."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from quire.errors import ConfigError
from quire.plan.ceilings import (
    FORMAT,
    Ceilings,
    Machine,
    NotUsable,
    ProductRate,
    default_path,
    read_ceilings,
    write_ceilings,
)

HERE = Machine(cpu="a processor", threads=2, torch="2.13.0")


def rate(rows: int, flops_per_s: float, *, inner: int = 8, columns: int = 8, dtype="bfloat16"):
    return ProductRate(
        dtype=dtype, rows=rows, inner=inner, columns=columns, flops_per_s=flops_per_s
    )


CEILINGS = Ceilings(
    machine=HERE,
    read_bytes_per_s=20e9,
    copy_bytes_per_s=10e9,
    products=(
        *(rate(64, 900.0), rate(1, 100.0), rate(8, 400.0)),
        *(rate(8, 50.0, inner=8, columns=800), rate(8, 7.0, dtype="float32")),
    ),
)


def test_product_rate_is_interpolated_in_log_rows():
    """The logarithmic midpoint of 8 and 64 rows is sqrt(8 * 64) = 22.6 rows.

    4 rows are two of the three doublings from 1 to 8: 100 + 2/3 * (400 - 100) = 300.
    16 rows are one of the three doublings from 8 to 64: 400 + 1/3 * (900 - 400) = 566.7.
    """
    assert CEILINGS.product_rate(4, 8, 8) == pytest.approx(300)
    assert CEILINGS.product_rate(16, 8, 8) == pytest.approx(400 + 500 / 3)


def test_product_rate_of_measured_shapes_or_of_the_nearest():
    """[8, 200]: ln(200 / 8) = 3.2 from [8, 8], ln(800 / 200) = 1.4 from [8, 800]."""
    assert [CEILINGS.product_rate(rows, 8, 8) for rows in (8, 1000)] == [400, 900]
    assert CEILINGS.product_rate(1, 8, 800) == CEILINGS.product_rate(8, 8, 200) == 50
    assert CEILINGS.product_rate(8, 9, 12) == 400
    assert CEILINGS.peak_product_rate() == 900
    assert CEILINGS.peak_product_rate("float32") == 7
    with pytest.raises(ConfigError, match="float16, only in: bfloat16, float32"):
        CEILINGS.peak_product_rate("float16")
    with pytest.raises(ConfigError, match="sizes of 1 or more"):
        CEILINGS.product_rate(0, 8, 8)


def test_written_ceilings_are_read_back(tmp_path: Path):
    path = tmp_path / "new" / "ceilings.json"

    write_ceilings(CEILINGS, path)

    assert read_ceilings(path, HERE) == CEILINGS
    assert [found.name for found in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("changed", "field"),
    [({"cpu": "another"}, "cpu"), ({"threads": 1}, "threads"), ({"torch": "3.0"}, "torch")],
)
def test_ceilings_of_another_machine_are_not_usable_with_a_reason(tmp_path, changed, field):
    path = tmp_path / "ceilings.json"
    write_ceilings(CEILINGS, path)

    found = read_ceilings(path, replace(HERE, **changed))

    assert isinstance(found, NotUsable)
    assert f"measured with {field} {getattr(HERE, field)}, not {changed[field]}" in found.reason
    assert "quire profile" in found.reason
    missing = read_ceilings(tmp_path / "none.json", HERE)
    assert isinstance(missing, NotUsable)
    assert "does not exist" in missing.reason


def damaged(**changes: object) -> str:
    stored = {
        "format": FORMAT,
        "machine": {"cpu": "a processor", "threads": 2, "torch": "2.13.0"},
        "read_bytes_per_s": 1.0,
        "copy_bytes_per_s": 1.0,
        "products": [],
    }
    changed = {key: value for key, value in (stored | changes).items() if value != "absent"}
    return json.dumps(changed)


def test_undamaged_file_and_one_of_an_earlier_version_are_usable(tmp_path: Path):
    earlier = {"one_thread_read_bytes_per_s": 1.0, "attention_bytes_per_s": {"native": 1.0}}
    for text in (damaged(), damaged(**earlier)):
        (tmp_path / "c.json").write_text(text)
        assert isinstance(read_ceilings(tmp_path / "c.json", HERE), Ceilings)


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", "null", '"x"', "{", "\udcff"),  # not UTF-8
        *(damaged(format=number) for number in (FORMAT - 1, FORMAT + 1)),
        *(damaged(read_bytes_per_s=rate) for rate in (0, -1.0, math.nan, "fast", "absent")),
        damaged(copy_of_something=1.0),
        damaged(machine=[]),
        damaged(copies=[]),
        damaged(copies={"cpu": {"out": {"bytes_per_s": 1.0}}}),
        damaged(copies={"cpu": {"out": {"bytes_per_s": 0}, "back": {"bytes_per_s": 1.0}}}),
        damaged(copies={"cpu": {"out": {"speed": 1}, "back": {"bytes_per_s": 1.0}}}),
        damaged(prefill={"a model": {"token_s": -1.0}}),
        damaged(prefill={"a model": 3.0}),
        damaged(machine={"cpu": "a processor"}),
        damaged(products={}),
        damaged(products=[{}]),
        damaged(products=[1]),
        damaged(products=[{"dtype": "x", "rows": 0, "inner": 1, "columns": 1, "flops_per_s": 1.0}]),
    ],
)
def test_damaged_file_is_not_usable(tmp_path: Path, text: str):
    (tmp_path / "c.json").write_text(text, errors="surrogateescape")

    found = read_ceilings(tmp_path / "c.json", HERE)

    assert isinstance(found, NotUsable)
    assert "not a valid ceilings file" in found.reason


def test_failed_write_keeps_the_old_file_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "c.json"
    write_ceilings(CEILINGS, path)
    monkeypatch.setattr("quire.layout.files.os.replace", fail)

    with pytest.raises(ConfigError, match="No space left"):
        write_ceilings(replace(CEILINGS, read_bytes_per_s=1.0), path)
    assert list(tmp_path.iterdir()) == [path]
    assert read_ceilings(path, HERE) == CEILINGS
    with pytest.raises(ConfigError, match="cannot write"):
        write_ceilings(CEILINGS, path / "c.json")


def test_default_path_is_in_the_user_cache():
    home = Path.home() / ".cache" / "quire" / "ceilings.json"
    assert default_path({"XDG_CACHE_HOME": "/caches"}) == Path("/caches/quire/ceilings.json")
    assert default_path({}) == home
    assert default_path({"XDG_CACHE_HOME": "not/absolute"}) == home
