"""Checks of a GPU before its worker is ready: kernels, CUDA graphs and overlapped steps against what they replace."""
