"""The native decoder: fused layers in C for Llama-like models on a CPU."""
