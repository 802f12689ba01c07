"""Jittable kernels: JAX only, no knowledge of mechanisms, loops over batches, devices or files."""
