"""How a cluster fares: what its scheduler and its processes say, as a table."""
