"""The C extension is built, and loads no second OpenMP runtime."""

import shutil

import pytest
import torch

from quire.kernels.native.library import NativeLibrary, NotLoaded, load_library

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
