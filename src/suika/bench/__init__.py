"""The benchmarks behind every number in docs/numbers.md."""
