"""ctypes mirrors of the argument structures of linear.h, rows.h and sample.h."""

import ctypes

PANEL_COLUMNS = 64  # output columns of a panel, as in linear.h
GATE_COLUMNS = 32  # columns of the gate in a panel of a gated product
GROUP_CODES = 128  # codes with one scale
PLAIN, AVX2, AVX512, AVX512_BF16 = range(4)  # code paths, as in args.h
STORE, ADD, GATE_SILU = range(3)  # what happens to the sums


class LinearArgs(ctypes.Structure):
    """Mirror of `linear_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_row_bytes", ctypes.c_int64),
        ("x_scales", ctypes.c_void_p),
        ("x_sums", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("out_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("inner", ctypes.c_int32),
        ("outer", ctypes.c_int32),
        ("weight_kind", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("finish", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )


class NormArgs(ctypes.Structure):
    """Mirror of `norm_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class RopeArgs(ctypes.Structure):
    """Mirror of `rope_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("column", ctypes.c_int64 * 3),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("norm", ctypes.c_void_p * 2),
        ("out", ctypes.c_void_p * 3),
        ("heads", ctypes.c_int32 * 3),
        ("rows", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("eps", ctypes.c_float),
    )


class CodeArgs(ctypes.Structure):
    """Mirror of `code_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("x_row", ctypes.c_int64),
        ("codes", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )


class ConvertArgs(ctypes.Structure):
    """Mirror of `convert_args`; its size is checked at load."""

    _fields_ = (
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("rows", ctypes.c_int32),
        ("width", ctypes.c_int32),
        ("x_dtype", ctypes.c_int32),
        ("out_dtype", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class ChainCall(ctypes.Structure):
    """Mirror of `chain_call`; its size is checked at load."""

    _fields_ = (
        ("args", ctypes.c_void_p),
        ("kind", ctypes.c_int32),
        ("part", ctypes.c_int32),
        ("num_threads", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class SampleRow(ctypes.Structure):
    """Mirror of `sample_row`; its size is checked at load."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("position", ctypes.c_uint64),
        ("top_p", ctypes.c_double),
        ("log_total", ctypes.c_double),
        ("log_min_p", ctypes.c_double),
        ("temperature", ctypes.c_float),
        ("top_k", ctypes.c_int32),
    )


class SampleArgs(ctypes.Structure):
    """Mirror of `sample_args`; its size is checked at load."""

    _fields_ = (
        ("logits", ctypes.c_void_p),
        ("logits_row", ctypes.c_int64),
        ("options", ctypes.c_void_p),
        ("token_ids", ctypes.c_void_p),
        ("status", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("vocab", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )
