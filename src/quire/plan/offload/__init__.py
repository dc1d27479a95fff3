"""Step costs of offloaded KV and weights: rates, splits, and comparisons of schedules.

Per token and layer: KV takes k seconds on the link, its activation x, its recompute r on the
device, CPU attention to it u. c is the device's other work on a layer. Pure arithmetic.
"""
