"""`python -m benchmarks gpu`: equality, kernels and steps on a GPU, against measured limits."""
