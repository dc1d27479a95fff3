"""Recording of attention statistics in a step; `quire.layout.statistics` defines each statistic.

pages           pages and records of a statistic
slot_attention  attention sums, sums of squares, low-attention counts: one number per slot
recorders       residual similarity, query moments, newest queries
watching        all statistics of a lane group in a step
"""
