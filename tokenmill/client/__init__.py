"""The clients: `core` decides without I/O, `sync` and `aio` carry it out."""
