"""Signatures of tokens, one bit per query head, and representatives (KVCrush).

query_heads       a view in which every query head is a lane
anchors           bits in words, distances between words, anchors of distances
representatives   tokens selected from slices in the order of distances
units             slots or pieces that are evicted whole
"""
