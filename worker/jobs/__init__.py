"""The jobs that this worker holds: their state, their requests, their results."""
