"""The threads between Redis and the engine. A file, its class and its thread share a name."""
