"""The measured claims of the project; not installed. `python -m bench --help`."""
