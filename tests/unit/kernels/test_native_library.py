"""A damaged, foreign or wrong native library gives a reason and a fallback, never a crash."""

import ctypes
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import quire.kernels.native
from quire.errors import UnknownName
from quire.kernels.native import self_test
from quire.kernels.native.library import (
    INSTRUCTION_SETS,
    MAX_CPU_ISA,
    PATHS,
    NativeLibrary,
    NotLoaded,
    limited,
    load_library,
    unfit_reason,
)
from quire.kernels.native.library import (
    LIBRARY as FILE,
)

ROOT = Path(__file__).parents[3]
LIBRARY = load_library()
needs_library = pytest.mark.skipif(
    isinstance(LIBRARY, NotLoaded), reason=getattr(LIBRARY, "reason", "")
)
BUILT = Path(quire.kernels.native.__file__).with_name(FILE)
LOAD_ALL = """
import json, sys
from pathlib import Path
from quire.kernels.native.library import NotLoaded, load_from

for name in sys.argv[1:]:
    found = load_from(Path(name))
    reason = found.reason if isinstance(found, NotLoaded) else None
    print(json.dumps([Path(name).stem, reason]), flush=True)
"""


def put(path: Path, content: bytes, *, digest_of: bytes | None, machine: str | None = None) -> Path:
    """Write a library and, unless it is None, its digest file."""
    path.write_bytes(content)
    if digest_of is not None:
        built = {
            "sha256": hashlib.sha256(digest_of).hexdigest(),
            "machine": machine or platform.machine(),
        }
        path.with_name(path.name + ".json").write_text(json.dumps(built))
    return path


def damage(folder: Path) -> list[Path]:
    """Write the built library intact and in every damaged or foreign form."""
    whole = BUILT.read_bytes()
    flipped, other_machine = bytearray(whole), bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    other_machine[18:20] = (0xF3).to_bytes(2, sys.byteorder)  # e_machine: RISC-V
    text = b"this is no library\n"
    return [
        put(folder / "whole.so", whole, digest_of=whole),
        put(folder / "truncated.so", whole[: len(whole) // 2], digest_of=whole),
        put(folder / "empty.so", b"", digest_of=whole),
        put(folder / "flipped.so", bytes(flipped), digest_of=whole),
        put(folder / "text.so", text, digest_of=text),
        put(folder / "foreign.so", bytes(other_machine), digest_of=bytes(other_machine)),
        put(folder / "machine.so", whole, digest_of=whole, machine="riscv64"),
        put(folder / "undigested.so", whole, digest_of=None),
        folder / "missing.so",
    ]


@pytest.fixture(scope="module")
def reasons(tmp_path_factory):
    """The reason of each library, loaded in a separate process that may crash."""
    names = [str(path) for path in damage(tmp_path_factory.mktemp("libraries"))]
    ran = subprocess.run(
        [sys.executable, "-c", LOAD_ALL, *names], capture_output=True, text=True, cwd=ROOT
    )
    assert ran.returncode == 0, (ran.returncode, ran.stdout, ran.stderr)
    return dict(json.loads(line) for line in ran.stdout.splitlines())


@needs_library
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated", "truncated or altered"),
        ("empty", "truncated or altered"),
        ("flipped", "truncated or altered"),
        ("text", "not a library of this system"),
        ("foreign", "another kind of processor"),
        ("machine", "built for riscv64"),
        ("undigested", "undigested.so.json, which the build writes, is missing"),
        ("missing", "cannot be read"),
    ],
)
def test_unfit_library_gives_a_reason_with_advice(reasons, name, message):
    if name in ("text", "foreign") and not sys.platform.startswith("linux"):
        pytest.skip("headers are compared on Linux only")

    assert message in reasons[name]
    assert "reinstall Quire" in reasons[name]


@needs_library
def test_intact_library_in_another_folder_is_loaded(reasons):
    """The control: otherwise the cases above could be refused for another reason."""
    assert reasons["whole"] is None


@needs_library
@pytest.mark.parametrize("digest", ["", "[]", "{}", '{"sha256": 1}', "\0"])
def test_invalid_digest_file_is_unfit(tmp_path, digest):
    library = put(tmp_path / "a.so", b"anything", digest_of=None)
    library.with_name("a.so.json").write_text(digest)

    assert "reinstall Quire" in unfit_reason(library)


# ---- the self-test -----------------------------------------------------------------------------


def corrupted(library: NativeLibrary, from_path: int) -> NativeLibrary:
    """The library with the start of its output cleared on paths from `from_path` on."""

    def attend(args, parallel_for, num_threads):
        failed = library.attend(args, parallel_for, num_threads)
        if args._obj.path >= from_path:
            ctypes.memset(args._obj.out, 0, 64)
        return failed

    return replace(library, attend=attend)


@needs_library
def test_library_keeps_its_path_if_the_self_test_passes():
    assert self_test.on_right_path(LIBRARY).path == LIBRARY.path


@needs_library
def test_failing_path_falls_back_to_the_next_with_a_warning(caplog):
    if LIBRARY.path == 0:
        pytest.skip("this CPU has one path only")
    found = self_test.on_right_path(corrupted(LIBRARY, LIBRARY.path))

    assert found.path == LIBRARY.path - 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert PATHS[LIBRARY.path] in caplog.text


@needs_library
def test_library_failing_on_every_path_is_not_used():
    assert "wrong numbers" in self_test.on_right_path(corrupted(LIBRARY, 0)).reason


@needs_library
@pytest.mark.parametrize("from_path", sorted({0, getattr(LIBRARY, "path", 0)}))
def test_path_with_wrong_attention_statistics_is_not_used(from_path):
    def tally(args, parallel_for):
        failed = LIBRARY.tally(args, parallel_for)
        if args._obj.path >= from_path and args._obj.count == 2:  # the measure LOW
            ctypes.memset(args._obj.numbers, 0, args._obj.page_bytes)
        return failed

    found = self_test.on_right_path(replace(LIBRARY, tally=tally))

    assert "wrong numbers" in found.reason if from_path == 0 else found.path == from_path - 1


@needs_library
@pytest.mark.parametrize("from_path", sorted({0, getattr(LIBRARY, "path", 0)}))
def test_path_with_wrong_codes_of_new_tokens_is_not_used(from_path):
    def write(args, parallel_for):
        failed = LIBRARY.write(args, parallel_for)
        if args._obj.path >= from_path and args._obj.coded:
            ctypes.memset(args._obj.plane[0], 0, args._obj.page_bytes)
        return failed

    found = self_test.on_right_path(replace(LIBRARY, write=write))

    assert "wrong numbers" in found.reason if from_path == 0 else found.path == from_path - 1


# ---- the build ---------------------------------------------------------------------------------


def build(folder: Path, compiler: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "setup.py", "build_ext"]
    command += ["--build-lib", str(folder / "lib"), "--build-temp", str(folder / "temp")]
    environment = os.environ | {"CC": compiler, "CFLAGS": "-O0"}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_failed_build_prints_a_notice(tmp_path):
    ran = build(tmp_path, "false")

    assert ran.returncode == 0, ran.stderr
    assert "Quire will use torch for attention" in ran.stdout + ran.stderr
    assert not list(tmp_path.rglob("_attention*"))


def test_failed_in_place_build_removes_the_earlier_library(tmp_path):
    """A library of an earlier build must not be taken for the result of this build."""
    source = Path("src/quire/kernels/native")
    for name in ("setup.py", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / source, tmp_path / source)
    stale = tmp_path / source / FILE
    stale.write_bytes(b"an earlier build")
    command = [sys.executable, "setup.py", "build_ext", "--inplace"]
    environment = os.environ | {"CC": "false"}
    ran = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)

    assert "Quire will use torch for attention" in ran.stdout + ran.stderr
    assert not list(stale.parent.glob("_attention*"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_build_writes_the_digest_that_the_loader_checks(tmp_path):
    ran = build(tmp_path, "cc")
    [library] = tmp_path.rglob(FILE)

    assert ran.returncode == 0, ran.stderr
    assert unfit_reason(library) is None


@needs_library
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_highest_instruction_set_can_be_limited(name: str) -> None:
    assert isinstance(LIBRARY, NativeLibrary)
    found = limited(LIBRARY, {MAX_CPU_ISA: name.upper()})

    assert found.path == min(LIBRARY.path, INSTRUCTION_SETS.index(name))
    assert limited(LIBRARY, {}) is LIBRARY


@needs_library
def test_unknown_instruction_set_raises() -> None:
    assert isinstance(LIBRARY, NativeLibrary)
    with pytest.raises(UnknownName, match="QUIRE_MAX_CPU_ISA 'avx3': did you mean avx2"):
        limited(LIBRARY, {MAX_CPU_ISA: "avx3"})


def test_every_path_has_the_name_of_its_instruction_set() -> None:
    assert len(INSTRUCTION_SETS) == len(PATHS)
