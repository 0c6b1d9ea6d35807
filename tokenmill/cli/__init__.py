"""The `tokenmill` command: one module a group of commands; those of the worker are imported when they are called."""
