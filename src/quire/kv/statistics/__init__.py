"""What a step writes into the pages of statistics: `quire.layout.statistics` says what each means.

slot_looks      attention sums, sums of squares, low looks: one number a slot
query_ring      the newest queries
query_moments   count, sum and products of all queries
attention_shift what attention does to the residual stream
watching        all of them together, for the lane groups of a step
"""
