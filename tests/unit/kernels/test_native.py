"""The C extension is built, and loads no second OpenMP runtime."""

import shutil

import pytest
import torch

from quire.kernels.native.library import NativeLibrary, NotLoaded, load_library
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
