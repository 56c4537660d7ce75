"""A stand-in for the Mooncake store: a master that knows who holds which key, and nodes that hold them."""
