"""Arithmetic without tensors: division of memory, capacity, step costs and rates."""
