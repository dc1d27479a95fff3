"""The number formats a model can be held in, and their size."""

from quire.errors import UnknownName

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes per value of each format, by its PyTorch name."""


def dtype_bytes(name: str) -> int:
    """Bytes of one value.

    Args:
        name: a key of `DTYPE_BYTES`, with or without the prefix `torch.`.

    Raises:
        UnknownName: no such format; the message offers the nearest ones.
    """
    try:
        return DTYPE_BYTES[name.removeprefix("torch.")]
    except KeyError:
        raise UnknownName("dtype", name, DTYPE_BYTES) from None
