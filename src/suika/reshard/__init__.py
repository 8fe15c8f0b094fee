"""Regions -> routes -> rounds -> transports. Knows tensors, not jobs."""
