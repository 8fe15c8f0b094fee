"""The live driver of the cycle: one reconcile loop, its store, and the socket that other processes talk to."""
