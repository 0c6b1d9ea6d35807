"""`tokenmill demo`: an embedded Redis and a worker, for one minute."""
