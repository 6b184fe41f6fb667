"""distlab: hand-written data parallelism and sharding, and the instruments that measure them."""

__version__ = "0.1.0"
