"""Loads the C library, or reports why it cannot be used.

The library is built at installation if a C compiler is available (see setup.py). It is loaded with
ctypes. It uses torch's threads, through the address of the C function `torch_parallel_for` that
torch's CPU library exports (torch/csrc/stable/c/shim.h, torch >= 2.10), so no second OpenMP runtime
is loaded.
"""

import ctypes
import functools
import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from quire.errors import UnknownName
from quire.kernels.native.arguments import (
    KEPT_LOGITS,
    MAX_OUTLIERS,
    MAX_RUNS,
    MAX_TOGETHER,
    SUM_SLOTS,
    AlignArgs,
    AttentionArgs,
    BestArgs,
    ChainCall,
    CodeArgs,
    ConvertArgs,
    ConvolveArgs,
    DeltaArgs,
    FreeArgs,
    LaneArgs,
    LaneMoveArgs,
    LinearArgs,
    MoveArgs,
    MovedPlane,
    NormArgs,
    RepresentArgs,
    RetainArgs,
    RingArgs,
    RopeArgs,
    SampleArgs,
    SampleRow,
    ScoreArgs,
    SignArgs,
    SpaceArgs,
    SparseArgs,
    TallyArgs,
    WriteArgs,
)

_log = logging.getLogger(__name__)
LIBRARY = "_attention.so"  # without a Python version: ctypes does not depend on it
PATHS = ("plain C", "AVX2", "AVX-512", "AVX-512 with bfloat16 products")
INSTRUCTION_SETS = ("plain", "avx2", "avx512", "avx512_bf16")  # of PATHS
MAX_CPU_ISA = "QUIRE_MAX_CPU_ISA"  # variable: highest instruction set to use, slow or not


@dataclass(frozen=True, slots=True)
class NativeLibrary:
    """The loaded library.

    Attributes:
        attend: `quire_attend` of attention.c.
        write: `quire_write`.
        move: `quire_move`.
        move_lanes: `quire_move_lanes`.
        tally: `quire_tally`.
        score: `quire_score`.
        score_bytes: `quire_score_bytes`.
        block_queries: `quire_block_queries`.
        scratch_bytes: `quire_scratch_bytes`.
        linear: `quire_linear` of linear.c.
        norm: `quire_norm` of rows.c.
        rope: `quire_rope`.
        code_rows: `quire_code_rows`.
        chain: `quire_chain`.
        sample: `quire_sample` of sample.c.
        sample_bytes: `quire_sample_bytes`.
        convolve: `quire_convolve` of recurrent.c.
        delta: `quire_delta`.
        space: `quire_space`.
        free: `quire_free` of select.c.
        best: `quire_best`.
        align: `quire_align`.
        sign: `quire_sign`.
        represent: `quire_represent`.
        retain: `quire_retain`.
        lanes: `quire_lanes`.
        represent_words: `quire_represent_words`.
        path: code path in use, an index into PATHS.
        best_path: highest path that this CPU has.
        fast_path: highest path whose products are also fast on this CPU.
        parallel_for: address of torch's thread function; None for a single thread.
        max_head_dim: largest supported head_dim.
    """

    attend: Callable[..., int]
    write: Callable[..., int]
    move: Callable[..., int]
    move_lanes: Callable[..., int]
    tally: Callable[..., int]
    score: Callable[..., int]
    score_bytes: Callable[..., int]
    block_queries: Callable[..., int]
    scratch_bytes: Callable[..., int]
    linear: Callable[..., int]
    norm: Callable[..., int]
    rope: Callable[..., int]
    code_rows: Callable[..., int]
    chain: Callable[..., int]
    sample: Callable[..., int]
    sample_bytes: Callable[..., int]
    convolve: Callable[..., int]
    delta: Callable[..., int]
    space: Callable[..., int]
    free: Callable[..., int]
    best: Callable[..., int]
    align: Callable[..., int]
    sign: Callable[..., int]
    represent: Callable[..., int]
    retain: Callable[..., int]
    lanes: Callable[..., int]
    represent_words: Callable[..., int]
    path: int
    best_path: int
    fast_path: int
    parallel_for: int | None
    max_head_dim: int

    def blocks(self, *dims: int) -> int:
        """Query vectors of a block; 0 if there are no blocks for keys or values of these dims."""
        return min(int(self.block_queries(self.path, dim)) for dim in dims)

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
    path = Path(__file__).with_name(LIBRARY)
    if not path.is_file():
        return NotLoaded(
            "the C extension was not built when Quire was installed: no C compiler, or the build "
            "failed (pip install -v shows it); or the wheel without it was installed"
        )
    library = load_from(path)
    if isinstance(library, NotLoaded):  # an install without it may be a choice
        _log.warning("attention runs in torch, which is slower: %s", library.reason)
        return library
    return limited(library, os.environ)


def limited(library: NativeLibrary, environment: Mapping[str, str]) -> NativeLibrary:
    """Return the library on the fast path, or on the highest one that MAX_CPU_ISA allows.

    Raises:
        UnknownName: no such instruction set.
    """
    name = environment.get(MAX_CPU_ISA, "").lower()
    if not name:
        return replace(library, path=library.fast_path)
    if name not in INSTRUCTION_SETS:
        raise UnknownName(MAX_CPU_ISA, name, INSTRUCTION_SETS)
    return replace(library, path=min(library.best_path, INSTRUCTION_SETS.index(name)))


_SIZES = {
    "args": AttentionArgs,
    "write_args": WriteArgs,
    "move_args": MoveArgs,
    "moved_plane": MovedPlane,
    "lane_move_args": LaneMoveArgs,
    "tally_args": TallyArgs,
    "ring_args": RingArgs,
    "sparse_args": SparseArgs,
    "score_args": ScoreArgs,
    "linear_args": LinearArgs,
    "norm_args": NormArgs,
    "rope_args": RopeArgs,
    "code_args": CodeArgs,
    "convert_args": ConvertArgs,
    "chain_call": ChainCall,
    "sample_args": SampleArgs,
    "sample_row": SampleRow,
    "convolve_args": ConvolveArgs,
    "delta_args": DeltaArgs,
    "space_args": SpaceArgs,
    "free_args": FreeArgs,
    "best_args": BestArgs,
    "align_args": AlignArgs,
    "sign_args": SignArgs,
    "represent_args": RepresentArgs,
    "retain_args": RetainArgs,
    "lane_args": LaneArgs,
}
"""Mirrors by name: `quire_NAME_size` returns the size of the C structure."""

_ARGUMENTS = {
    "attend": (ctypes.POINTER(AttentionArgs), ctypes.c_void_p, ctypes.c_int),
    "write": (ctypes.POINTER(WriteArgs), ctypes.c_void_p),
    "move": (ctypes.POINTER(MoveArgs), ctypes.c_void_p),
    "move_lanes": (ctypes.POINTER(LaneMoveArgs), ctypes.c_void_p),
    "tally": (ctypes.POINTER(TallyArgs), ctypes.c_void_p),
    "score": (ctypes.POINTER(ScoreArgs), ctypes.c_void_p, ctypes.c_int),
    "linear": (ctypes.POINTER(LinearArgs), ctypes.c_void_p, ctypes.c_int),
    "norm": (ctypes.POINTER(NormArgs), ctypes.c_void_p),
    "rope": (ctypes.POINTER(RopeArgs), ctypes.c_void_p),
    "code_rows": (ctypes.POINTER(CodeArgs), ctypes.c_void_p),
    "chain": (
        *(ctypes.POINTER(ChainCall), ctypes.c_int, ctypes.c_void_p, ctypes.c_int),
        ctypes.POINTER(ctypes.c_int64),
    ),
    "sample": (ctypes.POINTER(SampleArgs), ctypes.c_void_p, ctypes.c_int),
    "convolve": (ctypes.POINTER(ConvolveArgs), ctypes.c_void_p),
    "delta": (ctypes.POINTER(DeltaArgs), ctypes.c_void_p),
    "space": (ctypes.POINTER(SpaceArgs), ctypes.c_void_p),
    "free": (ctypes.POINTER(FreeArgs),),
    "best": (ctypes.POINTER(BestArgs),),
    "align": (ctypes.POINTER(AlignArgs),),
    "sign": (ctypes.POINTER(SignArgs),),
    "represent": (ctypes.POINTER(RepresentArgs),),
    "retain": (ctypes.POINTER(RetainArgs),),
    "lanes": (ctypes.POINTER(LaneArgs), ctypes.c_void_p),
}
"""Argument types of the functions `quire_NAME` that return a status."""


def load_from(path: Path) -> NativeLibrary | NotLoaded:
    """Load a library file, and check that it matches this version."""
    unfit = unfit_reason(path)
    if unfit is not None:
        return NotLoaded(f"{path.name} cannot be used: {unfit}")
    try:
        library = ctypes.CDLL(str(path))
        mismatch = _mismatch(library)
        if mismatch is not None:
            return NotLoaded(f"{path.name} was built {mismatch}; reinstall Quire")
        return _bound(library)
    except (OSError, AttributeError) as error:
        return NotLoaded(f"{path.name} cannot be used: {error}")


def _mismatch(library: ctypes.CDLL) -> str | None:
    """Return how the library was built, if not for this version."""
    for name, mirror in _SIZES.items():
        size = getattr(library, f"quire_{name}_size")
        size.restype = ctypes.c_int64
        if size() != ctypes.sizeof(mirror):
            return "from another version"
    blocks = library.quire_sum_slots(), library.quire_kept_logits()
    if (
        (library.quire_max_runs(), library.quire_max_outliers()) != (MAX_RUNS, MAX_OUTLIERS)
        or library.quire_max_together() < MAX_TOGETHER
        or blocks not in ((0, 0), (SUM_SLOTS, KEPT_LOGITS))
    ):
        return "with other sizes"
    return None


def _bound(library: ctypes.CDLL) -> NativeLibrary:
    functions: dict[str, Callable[..., int]] = {}
    for name, arguments in _ARGUMENTS.items():
        function = getattr(library, f"quire_{name}")
        function.argtypes, function.restype = arguments, ctypes.c_int
        functions[name] = function
    scratch_bytes, sample_bytes = library.quire_scratch_bytes, library.quire_sample_bytes
    scratch_bytes.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int)
    sample_bytes.argtypes = (ctypes.c_int,)
    score_bytes = library.quire_score_bytes
    score_bytes.argtypes, score_bytes.restype = (ctypes.POINTER(ScoreArgs),), ctypes.c_int64
    represent_words = library.quire_represent_words
    represent_words.argtypes = (ctypes.c_int, ctypes.c_int)
    scratch_bytes.restype = sample_bytes.restype = represent_words.restype = ctypes.c_int64
    return NativeLibrary(
        **functions,
        block_queries=library.quire_block_queries,
        scratch_bytes=scratch_bytes,
        score_bytes=score_bytes,
        sample_bytes=sample_bytes,
        represent_words=represent_words,
        path=library.quire_best_path(),
        best_path=library.quire_best_path(),
        fast_path=library.quire_fast_path(),
        parallel_for=_torch_parallel_for(),
        max_head_dim=library.quire_max_head_dim(),
    )


def _torch_parallel_for() -> int | None:
    """Return the address of torch's exported C function; None if this torch has none."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        function = ctypes.CDLL(str(library)).torch_parallel_for
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


# Checks of a built library before it is loaded: complete, and built for this machine.
#
# Loading a truncated or altered file can crash the process, so its digest is first compared with
# the one the build wrote next to it (see setup.py):
#
#     _attention.so
#     _attention.so.json   {"sha256": "...", "machine": "x86_64"}

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
