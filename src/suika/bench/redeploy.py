"""`suika bench redeploy`: real moves of a training job on this machine's CPU devices, against checkpoint and restart."""
