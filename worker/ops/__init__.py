"""For operators: metrics, health, logs, exit statuses. For all parts: threads, and the contact with Redis."""
