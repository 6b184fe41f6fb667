"""Command-line entry points. They parse options, start ranks and run the experiment."""
