"""The lab's notebook: which runs there are, and how two of them differ."""
