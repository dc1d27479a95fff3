"""ctypes mirrors of the argument structures of select.h."""

import ctypes


class FreeArgs(ctypes.Structure):
    """Mirror of `free_args`; its size is checked at load."""

    _fields_ = (
        ("live", ctypes.c_void_p),
        ("protected", ctypes.c_void_p),
        ("keep", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("retained", ctypes.c_void_p),
        ("columns", ctypes.c_int64 * 2),
        ("rows", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class BestArgs(ctypes.Structure):
    """Mirror of `best_args`; its size is checked at load."""

    _fields_ = (
        ("score", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("wanted", ctypes.c_void_p),
        ("best", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("score_row", ctypes.c_int64),
        ("score_head", ctypes.c_int64),
        ("free_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("heads", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("rows_per_layer", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class AlignArgs(ctypes.Structure):
    """Mirror of `align_args`; its size is checked at load."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("past_end", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("rows_per_layer", ctypes.c_int32),
        ("heads", ctypes.c_int32),
    )


class SignArgs(ctypes.Structure):
    """Mirror of `sign_args`; its size is checked at load."""

    _fields_ = (("free", FreeArgs), ("best", BestArgs), ("align", AlignArgs))


class RetainArgs(ctypes.Structure):
    """Mirror of `retain_args`; its size is checked at load."""

    _fields_ = (
        ("live", ctypes.c_void_p),
        ("free", ctypes.c_void_p),
        ("retained", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("score", ctypes.c_void_p),
        ("words", ctypes.c_void_p),
        ("anchor", ctypes.c_void_p),
        ("kept", ctypes.c_void_p),
        ("represent", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("marks", ctypes.c_void_p),
        ("score_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("slots", ctypes.c_int32),
        ("first", ctypes.c_int32),
        ("columns", ctypes.c_int32),
        ("unit_words", ctypes.c_int32),
        ("pick_best", ctypes.c_int32),
        ("path", ctypes.c_int32),
        ("unused", ctypes.c_int32),
    )


class RepresentArgs(ctypes.Structure):
    """Mirror of `represent_args`; its size is checked at load."""

    _fields_ = (
        ("words", ctypes.c_void_p),
        ("anchor", ctypes.c_void_p),
        ("grouped", ctypes.c_void_p),
        ("count", ctypes.c_void_p),
        ("score", ctypes.c_void_p),
        ("chosen", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("score_row", ctypes.c_int64),
        ("rows", ctypes.c_int32),
        ("units", ctypes.c_int32),
        ("unit_words", ctypes.c_int32),
        ("path", ctypes.c_int32),
    )
