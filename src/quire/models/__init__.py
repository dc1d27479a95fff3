"""Whose weights run: the decoder seam, the Transformers adapter and the loader.

The engine sees a `Decoder`; a decoder sees a `PagedAttention`. Neither knows how the other works,
and nothing here knows where keys and values lie.
"""
