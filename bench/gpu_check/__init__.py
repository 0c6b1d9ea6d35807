"""Checks tokenmill on the GPU of this machine, and measures it; `bench/gpu_check.sh` runs it.

`rows.py` lists the rows of the table: their order, time boxes and functions. Each row runs in a process of its own, so
that a row that crashes the GPU's context, or never ends, costs only itself.
"""
