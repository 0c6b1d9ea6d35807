"""What the worker knows of the jobs that it holds, and their way in and out."""
