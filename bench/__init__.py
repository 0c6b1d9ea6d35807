"""The measured claims of the project; not installed. `python -m bench --help`."""

from worker.loading import calm_threads

calm_threads()  # so that threads wait for work as in the worker
