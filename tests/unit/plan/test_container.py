"""Memory limits of containers, from trees of files as Linux writes them."""

from pathlib import Path

import pytest

from quire.plan.machine import container_free_bytes, container_total_bytes

GIB = 2**30
UNLIMITED_V1 = 9_223_372_036_854_771_712


@pytest.fixture
def write(tmp_path: Path):
    def put(path: str, text: object) -> Path:
        file = tmp_path / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{text}\n")
        return file

    return put


@pytest.fixture
def group(write):
    """Writes a control group's files."""

    def put(folder: str, limit: object, used: int, cached: int = 0, version: int = 2) -> None:
        names = ("max", "current", "inactive_file")
        if version == 1:
            names = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
        write(f"{folder}/memory.{names[0]}", limit)
        write(f"{folder}/memory.{names[1]}", used)
        write(f"{folder}/memory.stat", f"anon 5\n{names[2]} {cached}\nfile 7")

    return put


def test_the_limit_of_the_own_group_counts_and_cached_files_do_not(tmp_path, write, group):
    group("a/b", 4 * GIB, 3 * GIB, cached=GIB)
    own = write("own", "0::/a/b")

    assert container_free_bytes(tmp_path, own) == 2 * GIB
    assert container_total_bytes(tmp_path, own) == 4 * GIB


def test_the_tightest_group_on_the_way_to_the_root_counts(tmp_path, write, group):
    group("a/b", "max", 0)
    group("a", 2 * GIB, GIB)
    group(".", 8 * GIB, 7 * GIB + 1)
    own = write("own", "0::/a/b")

    assert container_free_bytes(tmp_path, own) == GIB - 1
    assert container_total_bytes(tmp_path, own) == 2 * GIB


@pytest.mark.parametrize("named", ["/", "/docker/0123", "/../other"])
def test_inside_a_container_the_root_of_the_mount_is_the_own_group(tmp_path, write, group, named):
    group(".", GIB, 0)

    assert container_free_bytes(tmp_path, write("own", f"0::{named}")) == GIB


def test_version_1_has_other_names(tmp_path, write, group):
    group("memory/a", 2 * GIB, GIB, cached=1000, version=1)
    group("memory", UNLIMITED_V1, 0, version=1)
    own = write("own", "12:cpu,cpuacct:/a\n7:memory:/a\n0::/")

    assert container_free_bytes(tmp_path, own) == GIB + 1000


@pytest.mark.parametrize("limit", ["max", "", "many"])
def test_no_limit_is_none(tmp_path, write, group, limit):
    group("a", limit, 0)
    own = write("own", "0::/a")

    assert container_free_bytes(tmp_path, own) is None
    assert container_total_bytes(tmp_path, own) is None


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert container_free_bytes(tmp_path, tmp_path / "missing") is None


def test_a_group_over_its_limit_has_less_than_nothing_left(tmp_path, write, group):
    group("a", GIB, GIB + 5)

    assert container_free_bytes(tmp_path, write("own", "0::/a")) == -5
