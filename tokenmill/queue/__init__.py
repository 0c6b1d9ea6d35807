"""The state of a queue as typed data: lanes, workers, jobs. Nothing here prints.

Each function takes a Redis client and the queue's `Keys` and asks Redis once; `Client.patiently` adds retries.
"""
