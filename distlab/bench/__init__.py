"""What benchmarks run: one step of model, strategy and data, held against one process."""
