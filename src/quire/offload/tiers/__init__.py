"""Stores for KV outside of the device: CPU memory, disk and network, with one interface."""
