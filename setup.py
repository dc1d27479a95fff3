"""Build of the optional C library; all other settings are in pyproject.toml.

The library is loaded with ctypes, so one wheel of a platform is for all versions of Python. A
failed build is a warning, not an error: the wheel is then pure Python, Quire uses torch for
attention, and `quire doctor` reports it. A digest is written next to the library, so that a damaged
or foreign library is never loaded (see src/quire/kernels/native/library.py).
"""

import hashlib
import json
import platform
import sys
import tempfile
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext
from setuptools.errors import CompileError

FLAGS = [
    "-O3",
    "-g0",  # debug information would be most of the file
    "-std=c11",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",  # sums may be split over vector lanes; NaN and infinity stay exact
    "-fno-signed-zeros",
]
# GCC 12 gives two arrays of an inlined function the same memory though both are in use: weights of
# decode attention were overwritten with -O1 and -O2. Clang does not know the flag.
FLAGS_IF_KNOWN = ["-fstack-reuse=none"]
# stripped here: a tool that strips the finished library would invalidate its digest
LINK_FLAGS = ["-Wl,--strip-all"] if sys.platform.startswith("linux") else []
NATIVE = "src/quire/kernels/native"


class BuildWithDigest(build_ext):
    """Write the SHA-256 digest and the machine type next to each library."""

    def get_ext_filename(self, fullname):
        """Return a name without the version of Python, which the library does not depend on."""
        return str(Path(*fullname.split(".")).with_suffix(".so"))

    def run(self):
        """Build, then check for the library; files of an earlier build are removed first."""
        for library in self.libraries_built():
            for path in library.parent.glob(f"{library.stem}*.so*"):
                path.unlink()
        super().run()
        for library in self.libraries_built():
            if not library.is_file():
                self.warn("the C extension was not built: Quire will use torch for attention")
                continue
            digest = hashlib.sha256(library.read_bytes()).hexdigest()
            built = {"sha256": digest, "machine": platform.machine()}
            library.with_name(library.name + ".json").write_text(json.dumps(built) + "\n")

    def build_extensions(self):
        """Build with the further flags that the compiler knows."""
        known = [flag for flag in FLAGS_IF_KNOWN if self.accepts(flag)]
        for extension in self.extensions:
            extension.extra_compile_args = [*extension.extra_compile_args, *known]
        super().build_extensions()

    def accepts(self, flag):
        """Return whether the compiler compiles an empty file with a flag."""
        with tempfile.TemporaryDirectory() as folder:
            source = Path(folder) / "empty.c"
            source.write_text("int quire_empty;\n")
            try:
                self.compiler.compile([str(source)], folder, extra_postargs=[flag])
            except CompileError:
                return False
        return True

    def libraries_built(self):
        """Return the path of each library, built or not."""
        return [Path(self.get_ext_fullpath(extension.name)) for extension in self.extensions]

    def get_outputs(self):
        """Return the libraries and their digest files."""
        return [path for name in super().get_outputs() for path in (name, name + ".json")]


class PlatformWheel(bdist_wheel):
    """Tag the wheel by its content: its platform if it has the library, `any` otherwise."""

    def get_tag(self):
        """Return the tags of Python, ABI and platform; called after the build."""
        self.root_is_pure = False
        *_, platform_tag = super().get_tag()
        libraries = self.get_finalized_command("build_ext").libraries_built()
        self.root_is_pure = not all(path.is_file() for path in libraries)
        return "py3", "none", "any" if self.root_is_pure else platform_tag


setup(
    cmdclass={"build_ext": BuildWithDigest, "bdist_wheel": PlatformWheel},
    ext_modules=[
        Extension(
            "quire.kernels.native._attention",
            sources=[
                f"{NATIVE}/{name}.c"
                for name in ("attention", "linear", "recurrent", "rows", "sample", "select")
            ],
            depends=sorted(glob(f"{NATIVE}/*.h")),
            extra_compile_args=FLAGS,
            extra_link_args=LINK_FLAGS,
            optional=True,
        )
    ],
)
