"""Legal layouts, scaling curves, device ordering, rank -> device mapping."""
