"""Which sequence computes how many tokens in a step, and the KV blocks that it needs."""
