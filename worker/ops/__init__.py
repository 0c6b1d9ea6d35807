"""What operators see, and what threads and connections share."""
