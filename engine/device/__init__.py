"""Runs the steps of a GPU: arrays staged on the host, tables on the device, CUDA graphs, the host tier."""
