"""The controller's door for the network: REST under /v1, over the calls of `Api`."""
