"""Short files to read first, and to copy from; they import what anyone can import."""
