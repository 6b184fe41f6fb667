from distlab.course import *  # noqa: F403
