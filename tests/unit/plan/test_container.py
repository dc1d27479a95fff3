"""Memory limits of containers, from cgroup file trees as Linux writes them."""

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


def test_limit_of_the_own_group_applies_without_cached_files(tmp_path, write, group):
    group("a/b", 4 * GIB, 3 * GIB, cached=GIB)
    membership = write("membership", "0::/a/b")
    assert container_free_bytes(tmp_path, membership) == 2 * GIB
    assert container_total_bytes(tmp_path, membership) == 4 * GIB


def test_smallest_limit_up_to_the_root_applies(tmp_path, write, group):
    group("a/b", "max", 0)
    group("a", 2 * GIB, GIB)
    group(".", 8 * GIB, 7 * GIB + 1)
    membership = write("membership", "0::/a/b")
    assert container_free_bytes(tmp_path, membership) == GIB - 1
    assert container_total_bytes(tmp_path, membership) == 2 * GIB


@pytest.mark.parametrize("path", ["/", "/docker/0123", "/../other"])
def test_mount_root_is_the_own_group_inside_a_container(tmp_path, write, group, path):
    group(".", GIB, 0)
    assert container_free_bytes(tmp_path, write("membership", f"0::{path}")) == GIB


def test_cgroup_version_1_file_names(tmp_path, write, group):
    group("memory/a", 2 * GIB, GIB, cached=1000, version=1)
    group("memory", UNLIMITED_V1, 0, version=1)
    membership = write("membership", "12:cpu,cpuacct:/a\n7:memory:/a\n0::/")
    assert container_free_bytes(tmp_path, membership) == GIB + 1000


@pytest.mark.parametrize("limit", ["max", "", "many"])
def test_no_limit_is_none(tmp_path, write, group, limit):
    group("a", limit, 0)
    membership = write("membership", "0::/a")
    assert container_free_bytes(tmp_path, membership) is None
    assert container_total_bytes(tmp_path, membership) is None


def test_group_over_its_limit_has_negative_free_bytes(tmp_path, write, group):
    group("a", GIB, GIB + 5)
    assert container_free_bytes(tmp_path, write("membership", "0::/a")) == -5
    assert container_free_bytes(tmp_path, tmp_path / "missing") is None
