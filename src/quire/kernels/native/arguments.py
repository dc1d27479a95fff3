"""What the C library is told: `part` and `attention_args` of args.h, field by field."""

import ctypes

ROW, FIRST, COUNT, PARTIAL, PART_FIELDS = 0, 1, 2, 3, 4  # columns of a part: see `part` in args.h


class AttentionArgs(ctypes.Structure):
    """Mirrors `attention_args`; its size is compared at load."""

    _fields_ = (
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("page_bytes", ctypes.c_int64),
        ("table", ctypes.c_void_p),
        ("table_row_stride", ctypes.c_int64),
        ("table_lane_stride", ctypes.c_int64),
        ("rows", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("query", ctypes.c_void_p),
        ("query_token_stride", ctypes.c_int64),
        ("query_head_stride", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("column_sums", ctypes.c_void_p),
        ("sums_stride", ctypes.c_int64),
        ("normalisers", ctypes.c_void_p),
        ("partials", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("scratch_bytes", ctypes.c_int64),
        ("walks", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("merges", ctypes.c_void_p),
        ("sums", ctypes.c_void_p),
        ("num_walks", ctypes.c_int32),
        ("num_blocks", ctypes.c_int32),
        ("num_merges", ctypes.c_int32),
        ("num_sums", ctypes.c_int32),
        ("num_partials", ctypes.c_int32),
        ("num_lanes", ctypes.c_int32),
        ("heads_per_page", ctypes.c_int32),
        ("group", ctypes.c_int32),
        ("first_lane", ctypes.c_int32),
        ("head_dim", ctypes.c_int32),
        ("page_tokens", ctypes.c_int32),
        ("dtype", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("path", ctypes.c_int32),
    )
