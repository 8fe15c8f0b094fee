"""Ways of getting bytes from one participant to another; one conformance suite runs against each."""
