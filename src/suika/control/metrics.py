"""Prometheus metrics: gauges from the state, counters and histograms as a fold over the append-only events."""
