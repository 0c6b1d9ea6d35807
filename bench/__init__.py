"""The measured claims of the project; not installed. `python -m bench --help`."""

from worker.loading import calm_threads

calm_threads()  # what is measured here waits as the worker does
