"""Model execution: the decoder seam, the Transformers adapter and the loader.

The engine calls a `Decoder`; a decoder calls a `PagedAttention`. Neither depends on the other's
implementation, and no module in this package knows where keys and values are stored.
"""
