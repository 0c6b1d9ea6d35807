"""`tokenmill demo`: a Redis and a worker for one minute."""
