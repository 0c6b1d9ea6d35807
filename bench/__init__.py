"""Benchmarks of the claims that the project makes; not part of the installed package. `python -m bench --help`."""

import contextlib

with contextlib.suppress(ModuleNotFoundError):  # bench.gpu_check runs without the packages of the worker
    from worker.loading import calm_threads

    calm_threads()  # so that threads wait for work as in the worker
