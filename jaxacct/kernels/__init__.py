"""Jittable kernels: JAX only, independent of mechanisms, batch loops, devices and files."""
