"""Kernels in Triton, for NVIDIA GPUs. Importing a module of this package needs the package `triton`."""
