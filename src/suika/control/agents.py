"""The controller's side of node agents: leases, orders and events over the connections that agents open."""
