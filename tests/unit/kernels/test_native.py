"""The C extension in its process: it is built, and brings no second OpenMP runtime."""

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
    """A second runtime's spinning threads would fight with torch's."""
    torch.ones(4) @ torch.ones(4)
    with open("/proc/self/maps") as maps:
        files = {line.split()[-1] for line in maps if "/" in line}
    runtimes = {f for f in files if any(name in f for name in ("libgomp", "libomp", "libiomp"))}

    assert len(runtimes) <= 1, runtimes


def test_the_library_is_there_where_a_compiler_is():
    """A build that failed is a notice to users; here it must be loud."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")

    assert isinstance(LIBRARY, NativeLibrary), LIBRARY.reason
