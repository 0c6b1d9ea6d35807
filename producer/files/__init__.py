"""Files and batches of the HTTP API: where they are kept, what their objects look like, and how a batch runs."""
