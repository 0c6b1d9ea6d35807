"""Prepares an engine before its first step: sizes of memory, the profile of the largest step, the compile cache."""
