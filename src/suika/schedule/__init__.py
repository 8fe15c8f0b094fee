"""The cycle and the policies. Pure: no I/O, no clock."""
