"""More than one engine: request routing between replicas, and simulated clusters."""
