"""The program on each node: connects out to the controller and carries out its orders. No torch."""
