"""The subject of benchmarks: one step of model, strategy and data, compared with one process."""
