"""Activation checkpoints: keys and values recomputed from stored layer inputs."""
