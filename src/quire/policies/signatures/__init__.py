"""What query heads think of tokens, in a bit each, and tokens that stand for others (KVCrush).

query_heads       a view in which every query head is a lane
bits              bits in words, distances between words
anchors           what distances are measured from
stored            bits that stay with their tokens
representatives   some of the tokens for all of them, spread over distances
"""
