"""The C library: its build, what is loaded, its self-test, and its source under sanitizers."""

import ast
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
import torch

import quire.kernels.native
from quire.errors import UnknownName
from quire.kernels.native import library, self_test
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
from quire.kernels.native.library import LIBRARY as FILE
from quire.kernels.select import select_backend

LIBRARY = load_library()
needs_library = pytest.mark.skipif(
    isinstance(LIBRARY, NotLoaded), reason=getattr(LIBRARY, "reason", "")
)


@needs_library
def test_one_openmp_runtime_is_mapped():
    """Spinning threads of a second runtime would compete with those of torch."""
    torch.ones(4) @ torch.ones(4)
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/" in line}
    runtimes = {f for f in files if any(name in f for name in ("libgomp", "libomp", "libiomp"))}

    assert len(runtimes) <= 1, runtimes


def test_library_is_loaded_if_a_compiler_is_installed():
    """A failed build is only a notice to users; in the tests it is a failure."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    assert isinstance(LIBRARY, NativeLibrary), LIBRARY.reason


@needs_library
@pytest.mark.parametrize(
    ("dims", "codec", "reason"),
    [
        ({(192, 128)}, "int8", "C extension"),
        ({(64, 64), (512, 512)}, "", "C extension"),
        ({(64, 64), (64, 576)}, "", "it has no code for torch.float32 with head_dim 576"),
        ({(64, 128), (32, 512)}, "int4:group=32/int4:group=16", "at most 16 groups of a vector"),
    ],
)
def test_all_widths_of_a_model_must_have_code(dims, codec, reason):
    """Keys and values, and every shape of heads."""
    options = {"dtype": torch.float32, "head_dim": dims, "scratch_bytes": 1 << 20, "codec": codec}
    found = select_backend("auto", torch.device("cpu"), **options)

    assert reason in found.reason
    assert found.backend.name == ("native" if reason == "C extension" else "gathered")


ROOT = Path(__file__).parents[3]
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


def put(path, content, *, digest_of, machine=None):
    """Write a library and, unless it is None, its digest file."""
    path.write_bytes(content)
    if digest_of is not None:
        digest = hashlib.sha256(digest_of).hexdigest()
        built = {"sha256": digest, "machine": machine or platform.machine()}
        path.with_name(path.name + ".json").write_text(json.dumps(built))
    return path


def damage(folder):
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
    names = map(str, damage(tmp_path_factory.mktemp("libraries")))
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
    assert reasons["whole"] is None  # the intact library in another folder is loaded


@needs_library
@pytest.mark.parametrize("digest", ["", "[]", "{}", '{"sha256": 1}', "\0"])
def test_invalid_digest_file_is_unfit(tmp_path, digest):
    library = put(tmp_path / "a.so", b"anything", digest_of=None)
    library.with_name("a.so.json").write_text(digest)

    assert "reinstall Quire" in unfit_reason(library)


def test_a_library_that_cannot_be_used_is_a_warning_and_a_missing_one_is_not(
    tmp_path, caplog, monkeypatch
):
    put(tmp_path / FILE, b"altered", digest_of=b"built")
    found = []
    for folder in (tmp_path, tmp_path / "without"):
        monkeypatch.setattr(library, "__file__", str(folder / "library.py"))
        found.append(load_library.__wrapped__().reason)
    assert ["altered" in reason for reason in found] == [True, False]
    warning = f"attention runs in torch, which is slower: {found[0]}"
    assert [record.getMessage() for record in caplog.records] == [warning]


# ---- the self-test -----------------------------------------------------------------------------


def corrupted(library, from_path):
    """The library with the start of its output cleared on paths from `from_path` on."""

    def attend(args, parallel_for, num_threads):
        failed = library.attend(args, parallel_for, num_threads)
        if args._obj.path >= from_path:
            ctypes.memset(args._obj.out, 0, 64)
        return failed

    return replace(library, attend=attend)


@needs_library
def test_failing_path_falls_back_to_the_next_with_a_warning_if_there_is_one(caplog):
    assert "wrong numbers" in self_test.on_right_path(corrupted(LIBRARY, 0)).reason
    caplog.clear()
    if LIBRARY.path == 0:
        pytest.skip("this CPU has one path only")
    found = self_test.on_right_path(corrupted(LIBRARY, LIBRARY.path))

    assert self_test.on_right_path(LIBRARY).path == LIBRARY.path
    assert found.path == LIBRARY.path - 1
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert PATHS[LIBRARY.path] in caplog.text


@needs_library
@pytest.mark.parametrize("name", ["tally", "write"])
@pytest.mark.parametrize("from_path", sorted({0, getattr(LIBRARY, "path", 0)}))
def test_path_with_wrong_statistics_or_codes_is_not_used(name, from_path):
    right = getattr(LIBRARY, name)

    def wrong(args, parallel_for):
        failed, own = right(args, parallel_for), args._obj
        is_wrong = own.count == 2 if name == "tally" else own.coded  # 2: the measure LOW
        if own.path >= from_path and is_wrong:
            target = own.numbers if name == "tally" else own.plane[0]
            ctypes.memset(target, 0, own.page_bytes)
        return failed

    found = self_test.on_right_path(replace(LIBRARY, **{name: wrong}))

    assert "wrong numbers" in found.reason if from_path == 0 else found.path == from_path - 1


# ---- the build ---------------------------------------------------------------------------------


def build(*options, compiler, folder=ROOT):
    command = [sys.executable, "setup.py", "build_ext", *options]
    environment = os.environ | {"CC": compiler, "CFLAGS": "-O0"}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment)


def test_failed_build_prints_a_notice(tmp_path):
    ran = build(f"--build-lib={tmp_path}/lib", f"--build-temp={tmp_path}/temp", compiler="false")

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
    ran = build("--inplace", compiler="false", folder=tmp_path)

    assert "Quire will use torch for attention" in ran.stdout + ran.stderr
    assert not list(stale.parent.glob("_attention*"))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_build_writes_the_digest_that_the_loader_checks(tmp_path):
    ran = build(f"--build-lib={tmp_path}/lib", f"--build-temp={tmp_path}/temp", compiler="cc")
    [library] = tmp_path.rglob(FILE)

    assert ran.returncode == 0, ran.stderr
    assert unfit_reason(library) is None


@needs_library
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_highest_instruction_set_can_be_limited(name):
    found = limited(LIBRARY, {MAX_CPU_ISA: name.upper()})

    assert found.path == min(LIBRARY.best_path, INSTRUCTION_SETS.index(name))
    assert limited(LIBRARY, {}).path == LIBRARY.fast_path <= LIBRARY.best_path
    with pytest.raises(UnknownName, match="QUIRE_MAX_CPU_ISA 'avx3': did you mean avx2"):
        limited(LIBRARY, {MAX_CPU_ISA: "avx3"})
    assert len(INSTRUCTION_SETS) == len(PATHS)


SOURCE = Path(quire.kernels.native.__file__).parent
HARNESSES = Path(__file__).parents[2] / "native"
SANITIZED = ["-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover"]


def flags_of_the_library():
    """The flags in setup.py."""
    tree = ast.parse((Path(__file__).parents[3] / "setup.py").read_text(encoding="utf-8"))
    lists = {
        node.targets[0].id: ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and node.targets[0].id in ("FLAGS", "FLAGS_IF_KNOWN")
    }
    return [*lists["FLAGS"], *lists["FLAGS_IF_KNOWN"]]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no gcc")
@pytest.mark.parametrize(
    ("sources", "flags"),
    [
        (["harness.c"], SANITIZED),
        (["linear_harness.c", SOURCE / "attention.c"], SANITIZED),
        (["select_harness.c"], SANITIZED),
        # sanitizers change the layout of the stack, where a compiler's fault was hidden
        (["harness.c"], flags_of_the_library()),
        (["harness.c"], ["-O1", "-fstack-reuse=none"]),
    ],
)
def test_c_kernels_agree_and_access_no_memory_out_of_bounds(sources, flags, tmp_path):
    program, paths = tmp_path / "harness", [str(HARNESSES / source) for source in sources]
    build = ["gcc", "-std=c11", "-Wall", *flags, f"-I{SOURCE}", *paths, "-o", str(program), "-lm"]
    built = subprocess.run(build, capture_output=True, text=True)
    if "cannot find" in built.stderr and "CI" not in os.environ:
        pytest.skip("gcc has no sanitizer libraries here")
    assert built.returncode == 0, built.stderr
    ran = subprocess.run([program], capture_output=True, text=True)

    assert ran.returncode == 0, ran.stdout + ran.stderr
