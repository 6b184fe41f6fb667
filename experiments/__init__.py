"""One question per file: a config, a `run()` that returns records, a `main()`."""
