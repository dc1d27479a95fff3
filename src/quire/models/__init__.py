"""Model execution: the decoder seam, the Transformers adapter and the loader.

The engine calls a `Decoder`; a decoder calls a `PagedAttention`. Neither depends on the other's
implementation. No module in this package depends on the location of keys and values.
"""
