"""Build of the optional C extension; all other settings are in pyproject.toml.

A failed build is a warning, not an error: Quire then uses torch for attention, and `quire doctor`
reports it. A digest is written next to the library, so that a damaged or foreign library is never
loaded (see src/quire/kernels/native/library.py).
"""

import hashlib
import json
import platform
from glob import glob
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

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
NATIVE = "src/quire/kernels/native"


class BuildWithDigest(build_ext):
    """Write the SHA-256 digest and the machine type next to each library."""

    def run(self):
        """Build, then check for the library; files of an earlier build are removed first."""
        for extension in self.extensions:
            old = Path(self.get_ext_fullpath(extension.name))
            for path in (old, old.with_name(old.name + ".json")):
                path.unlink(missing_ok=True)
        super().run()
        for extension in self.extensions:
            library = Path(self.get_ext_fullpath(extension.name))
            if not library.is_file():
                self.warn("the C extension was not built: Quire will use torch for attention")
                continue
            digest = hashlib.sha256(library.read_bytes()).hexdigest()
            built = {"sha256": digest, "machine": platform.machine()}
            library.with_name(library.name + ".json").write_text(json.dumps(built) + "\n")

    def get_outputs(self):
        """Return the libraries and their digest files."""
        return [path for name in super().get_outputs() for path in (name, name + ".json")]


setup(
    cmdclass={"build_ext": BuildWithDigest},
    ext_modules=[
        Extension(
            "quire.kernels.native._attention",
            sources=[f"{NATIVE}/{name}.c" for name in ("attention", "linear", "rows", "sample")],
            depends=sorted(glob(f"{NATIVE}/*.h")),
            extra_compile_args=FLAGS,
            optional=True,
        )
    ],
)
