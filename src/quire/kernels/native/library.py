"""Loads the C library, or reports why it cannot be used.

The library is built at installation if a C compiler is available (see setup.py). It is loaded with
ctypes. It uses torch's threads, through the address of the C function `torch_parallel_for` that
torch's CPU library exports (torch/csrc/stable/c/shim.h, torch >= 2.10), so no second OpenMP runtime
is loaded.
"""

import ctypes
import functools
import hashlib
import importlib.machinery
import json
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.errors import UnknownName
from quire.kernels.native.arguments import (
    KEPT_LOGITS,
    MAX_TOGETHER,
    SUM_SLOTS,
    AttentionArgs,
    MoveArgs,
    TallyArgs,
    WriteArgs,
)
from quire.kernels.native.coding import MAX_OUTLIERS, MAX_RUNS
from quire.kernels.native.linear_args import ChainCall, CodeArgs, LinearArgs, NormArgs, RopeArgs

PATHS = ("plain C", "AVX2", "AVX-512", "AVX-512 with bfloat16 products")
INSTRUCTION_SETS = ("plain", "avx2", "avx512", "avx512_bf16")  # of PATHS
MAX_CPU_ISA = "QUIRE_MAX_CPU_ISA"  # environment variable: highest instruction set to use


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library.

    Attributes:
        attend: `quire_attend` of attention.c.
        write: `quire_write`.
        move: `quire_move`.
        tally: `quire_tally`.
        block_queries: `quire_block_queries`.
        scratch_bytes: `quire_scratch_bytes`.
        linear: `quire_linear` of linear.c.
        norm: `quire_norm` of rows.c.
        rope: `quire_rope`.
        code_rows: `quire_code_rows`.
        chain: `quire_chain`.
        path: code path for this CPU, an index into PATHS.
        parallel_for: address of torch's thread function; None for a single thread.
        max_head_dim: largest supported head_dim.
    """

    attend: Callable[..., int]
    write: Callable[..., int]
    move: Callable[..., int]
    tally: Callable[..., int]
    block_queries: Callable[..., int]
    scratch_bytes: Callable[..., int]
    linear: Callable[..., int]
    norm: Callable[..., int]
    rope: Callable[..., int]
    code_rows: Callable[..., int]
    chain: Callable[..., int]
    path: int
    parallel_for: int | None
    max_head_dim: int

    @property
    def description(self) -> str:
        """Description of the code path and threads, for users."""
        threads = "torch's threads" if self.parallel_for else "one thread"
        return f"C extension, {PATHS[self.path]}, {threads}"


@dataclass(frozen=True, slots=True)
class NotLoaded:
    """Reason why the library is not available."""

    reason: str


@functools.cache
def load_library() -> NativeLibrary | NotLoaded:
    """Load the library once; return a reason if it is missing or unusable.

    Raises:
        UnknownName: the environment variable MAX_CPU_ISA is not one of INSTRUCTION_SETS.
    """
    folder = Path(__file__).parent
    found = [folder / f"_attention{s}" for s in importlib.machinery.EXTENSION_SUFFIXES]
    path = next((path for path in found if path.is_file()), None)
    if path is None:
        return NotLoaded(
            "the C extension was not built when Quire was installed: no C compiler, or the build "
            "failed (pip install -v shows it)"
        )
    library = load_from(path)
    return library if isinstance(library, NotLoaded) else limited(library, os.environ)


def limited(library: NativeLibrary, environment: Mapping[str, str]) -> NativeLibrary:
    """Return the library on the path that MAX_CPU_ISA allows, for tests and measurements.

    Raises:
        UnknownName: no such instruction set.
    """
    name = environment.get(MAX_CPU_ISA, "").lower()
    if not name:
        return library
    if name not in INSTRUCTION_SETS:
        raise UnknownName(MAX_CPU_ISA, name, INSTRUCTION_SETS)
    return replace(library, path=min(library.path, INSTRUCTION_SETS.index(name)))


def load_from(path: Path) -> NativeLibrary | NotLoaded:
    """Load a library file, and check that it matches this version."""
    unfit = unfit_reason(path)
    if unfit is not None:
        return NotLoaded(f"{path.name} cannot be used: {unfit}")
    try:
        library = ctypes.CDLL(str(path))
        sizes = (
            library.quire_args_size,
            library.quire_write_args_size,
            library.quire_move_args_size,
            library.quire_tally_args_size,
            library.quire_linear_args_size,
            library.quire_norm_args_size,
            library.quire_rope_args_size,
            library.quire_code_args_size,
        )
        limit, write, tally = library.quire_max_head_dim, library.quire_write, library.quire_tally
        max_runs, max_outliers = library.quire_max_runs, library.quire_max_outliers
        together, sum_slots = library.quire_max_together, library.quire_sum_slots
        kept_logits = library.quire_kept_logits
        attend, best_path = library.quire_attend, library.quire_best_path
        move, linear = library.quire_move, library.quire_linear
        norm, rope, code_rows = library.quire_norm, library.quire_rope, library.quire_code_rows
        chain = library.quire_chain
        block_queries, scratch_bytes = library.quire_block_queries, library.quire_scratch_bytes
    except (OSError, AttributeError) as error:
        return NotLoaded(f"{path.name} cannot be used: {error}")
    for size in sizes:
        size.restype = ctypes.c_int64
    mirrors = (
        *(AttentionArgs, WriteArgs, MoveArgs, TallyArgs),
        *(LinearArgs, NormArgs, RopeArgs, CodeArgs),
    )
    if [size() for size in sizes] != [ctypes.sizeof(args) for args in mirrors]:
        return NotLoaded(f"{path.name} was built from another version; reinstall Quire")
    if (max_runs(), max_outliers()) != (MAX_RUNS, MAX_OUTLIERS):
        return NotLoaded(f"{path.name} was built with other sizes; reinstall Quire")
    sizes_of_blocks = sum_slots(), kept_logits()
    if together() < MAX_TOGETHER or sizes_of_blocks not in ((0, 0), (SUM_SLOTS, KEPT_LOGITS)):
        return NotLoaded(f"{path.name} was built with other sizes; reinstall Quire")
    attend.argtypes = (ctypes.POINTER(AttentionArgs), ctypes.c_void_p, ctypes.c_int)
    attend.restype = ctypes.c_int
    write.argtypes = (ctypes.POINTER(WriteArgs), ctypes.c_void_p)
    write.restype = ctypes.c_int
    move.argtypes = (ctypes.POINTER(MoveArgs), ctypes.c_void_p)
    move.restype = ctypes.c_int
    tally.argtypes = (ctypes.POINTER(TallyArgs), ctypes.c_void_p)
    tally.restype = ctypes.c_int
    linear.argtypes = (ctypes.POINTER(LinearArgs), ctypes.c_void_p, ctypes.c_int)
    chain.argtypes = (
        *(ctypes.POINTER(ChainCall), ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
        ctypes.POINTER(ctypes.c_int64),
    )
    for function, args in ((norm, NormArgs), (rope, RopeArgs), (code_rows, CodeArgs)):
        function.argtypes = (ctypes.POINTER(args), ctypes.c_void_p)
    scratch_bytes.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int)
    scratch_bytes.restype = ctypes.c_int64
    return NativeLibrary(
        attend=attend,
        write=write,
        move=move,
        tally=tally,
        block_queries=block_queries,
        scratch_bytes=scratch_bytes,
        linear=linear,
        norm=norm,
        rope=rope,
        code_rows=code_rows,
        chain=chain,
        path=best_path(),
        parallel_for=_torch_parallel_for(),
        max_head_dim=limit(),
    )


def _torch_parallel_for() -> int | None:
    """Return the address of torch's exported C function; None if this torch has none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).torch_parallel_for
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


# ---- fitness -------------------------------------------------------------------------------------

# Checks of a built library before it is loaded: complete, and built for this machine.
#
# Loading a truncated or altered file can crash the process, so its digest is first compared with
# the one the build wrote next to it (see setup.py):
#
#     _attention.cpython-311-x86_64-linux-gnu.so
#     _attention.cpython-311-x86_64-linux-gnu.so.json   {"sha256": "...", "machine": "x86_64"}

DIGEST_SUFFIX = ".json"
_REMEDY = "reinstall Quire to build it again"
_PROCESS = Path("/proc/self/exe")  # Linux only
_ELF = b"\x7fELF"
_HEADER_BYTES, _CLASS_AND_ORDER, _MACHINE = 20, slice(4, 6), slice(18, 20)  # ELF header fields


def unfit_reason(path: Path) -> str | None:
    """Return why a library must not be loaded; None if all checks pass.

    Args:
        path: path of the library; the build's digest is next to it.
    """
    digest_path = path.with_name(path.name + DIGEST_SUFFIX)
    try:
        content = path.read_bytes()
    except OSError as error:
        return f"it cannot be read ({error.strerror}); {_REMEDY}"
    try:
        built = json.loads(digest_path.read_bytes())
    except FileNotFoundError:
        return f"{digest_path.name}, which the build writes, is missing; {_REMEDY}"
    except (OSError, ValueError) as error:
        return f"{digest_path.name} cannot be read ({error}); {_REMEDY}"
    if not isinstance(built, dict) or built.get("sha256") != hashlib.sha256(content).hexdigest():
        return f"its content does not match the build, it is truncated or altered; {_REMEDY}"
    if built.get("machine") != platform.machine():
        return (
            f"it was built for {built.get('machine')}, this is {platform.machine()}; {_REMEDY} here"
        )
    return _foreign_reason(content)


def _foreign_reason(content: bytes) -> str | None:
    """Return the reason if the library is for another platform; dlopen would call it missing."""
    try:
        with _PROCESS.open("rb") as file:
            ours = file.read(_HEADER_BYTES)
    except OSError:
        return None
    if not content.startswith(_ELF) or len(content) < _HEADER_BYTES:
        return f"it is not a library of this system; {_REMEDY}"
    if any(content[part] != ours[part] for part in (_CLASS_AND_ORDER, _MACHINE)):
        return f"it holds code for another kind of processor; {_REMEDY} here"
    return None
