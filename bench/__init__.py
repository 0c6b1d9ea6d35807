"""Benchmarks of the claims that the project makes; not part of the installed package. `python -m bench --help`."""

from worker.loading import calm_threads

calm_threads()  # so that threads wait for work as in the worker
