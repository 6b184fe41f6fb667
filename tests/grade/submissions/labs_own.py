"""The lab's own classes behind the hooks."""

from distlab.course import *  # noqa: F403
