"""Where node agents come from: local processes, Slurm, Ray."""
