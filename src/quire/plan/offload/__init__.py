"""What a running sequence pays for KV that is not on the device: rates, splits, schedules compared.

Per token and layer KV takes k seconds on the link, its activation x, its recomputation r on the
device, its attention u on the host; c is the device's other work on a layer. Pure arithmetic.
"""
