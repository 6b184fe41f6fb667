"""Memory of one rank through a training step, in closed form."""
