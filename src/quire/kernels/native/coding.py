"""Description of coded pages for the C library: mirror of `coding` of args.h."""

import ctypes
from math import gcd

import torch
from torch import Tensor

from quire.kernels.backend import LayerPages
from quire.kernels.coded import CodedPages, CodedPlanes
from quire.layout.codecs import CodecSpec

PLAIN_NUMBERS, INT8_CODES, BIT_CODES, FP8_CODES = range(4)
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
MAX_RUNS = 16  # runs of a vector: MAX_RUNS of walk.h
MAX_OUTLIERS = 8  # outliers of a vector: MAX_OUTLIERS of strip.h

_KINDS = {
    "int8": INT8_CODES,
    "fp8": FP8_CODES,
    "int4": BIT_CODES,
    "int2": BIT_CODES,
    "int4_outliers": BIT_CODES,
}

_ENCODED = ("int8", "int4", "int2")
"""Rules that the C library encodes; torch encodes the others."""


class CodingArgs(ctypes.Structure):
    """Mirror of `coding`; it is part of `attention_args`, whose size is checked at load."""

    _fields_ = (
        ("scales", ctypes.c_void_p),
        ("zeros", ctypes.c_void_p),
        ("indices", ctypes.c_void_p),
        ("outliers", ctypes.c_void_p),
        ("vector_bytes", ctypes.c_int64),
        ("kind", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("bits", ctypes.c_int32),
        ("channels", ctypes.c_int32),
        ("run", ctypes.c_int32),
        ("num_runs", ctypes.c_int32),
        ("num_outliers", ctypes.c_int32),
        ("index_bytes", ctypes.c_int32),
    )


def coding_of(side: CodedPlanes) -> CodingArgs:
    """Describe coded keys or values for the C library."""
    spec, head_dim, codes = side.codec.spec, side.codec.head_dim, side.planes[0]
    named = dict(zip((p.name for p in spec.planes(head_dim)), side.planes, strict=True))
    indices = named.get("outlier_indices")
    return CodingArgs(
        scales=_address(named.get("scales")),
        zeros=_address(named.get("zeros")),
        indices=_address(indices),
        outliers=_address(named.get("outlier_values")),
        vector_bytes=codes.shape[3] * codes.itemsize,
        kind=_kind(spec),
        dtype=DTYPES[codes.dtype] if spec.is_plain else 0,
        bits=spec.code_bits,
        channels=_channels(spec, head_dim),
        run=_run(spec, head_dim),
        num_runs=head_dim // _run(spec, head_dim),
        num_outliers=spec.num_outliers(head_dim),
        index_bytes=0 if indices is None else indices.itemsize,
    )


def plain_coding(plane: Tensor) -> CodingArgs:
    """Describe a plane [pages, heads, tokens, head_dim] of plain numbers for the C library."""
    head_dim = plane.shape[3]
    return CodingArgs(
        vector_bytes=head_dim * plane.itemsize,
        kind=PLAIN_NUMBERS,
        dtype=DTYPES[plane.dtype],
        channels=head_dim,
        run=head_dim,
        num_runs=1,
    )


def why_not(spec: CodecSpec, head_dim: int) -> str | None:
    """Return why the C library cannot read a codec, or None."""
    if (not spec.is_plain and spec.rule not in _KINDS) or spec.constants:
        return f"it does not read {spec.name}"
    if head_dim // _run(spec, head_dim) > MAX_RUNS:
        return (
            f"it reads at most {MAX_RUNS} groups of a vector, and {spec.name} has more for "
            f"head_dim {head_dim}"
        )
    if spec.num_outliers(head_dim) > MAX_OUTLIERS:
        return f"it reads at most {MAX_OUTLIERS} outliers of a vector, {spec.name} has more"
    return None


def unfit_codes(pages: LayerPages, coded: CodedPages) -> str | None:
    """Return why the C library cannot read these pages, or None."""
    if pages.full_precision is not None:
        return "full-precision tokens"
    if pages.promoted is not None:
        return "tokens in a finer codec than their pages"
    for side in (coded.key, coded.value):
        reason = why_not(side.codec.spec, side.codec.head_dim)
        if reason is not None:
            return reason
        if any(not _is_whole(plane) for plane in side.planes):
            return "planes of codes whose strides differ from those of pages"
    return None


def can_encode(coded: CodedPages, vectors: Tensor) -> bool:
    """Return whether the C library can encode these vectors into these planes."""
    sides = (coded.key, coded.value)
    return vectors.dtype in DTYPES and all(
        why_not(side.codec.spec, side.codec.head_dim) is None
        and (side.codec.spec.is_plain or side.codec.spec.rule in _ENCODED)
        and all(_is_whole(plane) for plane in side.planes)
        for side in sides
    )


def _is_whole(plane: Tensor) -> bool:
    _, _, tokens, width = plane.shape
    inner: tuple[int, ...] = (tokens * width, width, 1)
    return plane.device.type == "cpu" and plane.stride()[1:] == inner


def _address(plane: Tensor | None) -> int | None:
    return None if plane is None else plane.data_ptr()


def _kind(spec: CodecSpec) -> int:
    return PLAIN_NUMBERS if spec.is_plain else _KINDS[spec.rule]


def _channels(spec: CodecSpec, head_dim: int) -> int:
    """Return the number of neighbouring channels that share a scale."""
    return spec.group_of(head_dim) if spec.has_zeros else head_dim


def _run(spec: CodecSpec, head_dim: int) -> int:
    """Return the number of channels that share a scale and are adjacent in the packed bytes."""
    segments = 8 // spec.code_bits if spec.rule in _KINDS and spec.code_bits < 8 else 1
    return gcd(_channels(spec, head_dim), head_dim // segments)
