"""Decides how many tokens each sequence computes in a step, and manages the KV blocks for them."""
