"""What the wheel holds: distlab and kernels by their names, the commands inside of distlab.

A user's environment may have packages of its own called launch or experiments, so the wheel installs neither name:
they lie in `distlab/commands`, where the script `distlab` (distlab/command.py) finds them.
"""

from setuptools import find_packages, setup

commands = find_packages(include=["experiments*", "launch*"])
setup(
    packages=find_packages(include=["distlab*", "kernels*"]) + [f"distlab.commands.{name}" for name in commands],
    package_dir={f"distlab.commands.{name}": name for name in ("experiments", "launch")},
)
