"""What can be seen of a queue, as typed data: lanes, workers, jobs. Nothing here prints.

Each function takes a Redis client and the queue's `Keys` and asks once, without retries: `Client.patiently` adds them.
"""
