"""Suika re-schedules 3D-parallel LLM training jobs in a shared GPU cluster while they run."""

__version__ = "0.1.0"
