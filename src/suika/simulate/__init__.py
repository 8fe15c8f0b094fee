"""Event heap and simulated clock, trace readers, workloads, faults, report."""
