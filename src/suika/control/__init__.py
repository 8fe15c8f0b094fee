"""Controller, store, API, agents."""
