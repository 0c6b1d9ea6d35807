"""The `tokenmill` command: one module for each group of commands; those of the worker are imported when called."""
