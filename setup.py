"""Builds the optional C extension; everything else stands in pyproject.toml.

A failed build is a notice, not an error: Quire then attends with torch alone, and `quire doctor`
says so.
"""

from setuptools import Extension, setup

FLAGS = [
    "-O3",
    "-std=c11",
    "-ffp-contract=fast",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-fassociative-math",  # sums may be split over vector lanes; NaN and infinity stay exact
    "-fno-signed-zeros",
]

setup(
    ext_modules=[
        Extension(
            "quire.kernels.native._attention",
            sources=["src/quire/kernels/native/attention.c"],
            extra_compile_args=FLAGS,
            optional=True,
        )
    ]
)
