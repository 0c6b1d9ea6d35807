"""What operators see (metrics, health, logs, exit statuses), and what threads and Redis connections share."""
