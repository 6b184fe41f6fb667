"""List the packages that a wheel installs.

distlab and kernels are installed under their names, and the commands inside of distlab.

A user's environment may have packages of its own called launch or experiments, so the wheel
installs neither name: they are stored in `distlab/commands`, where the script `distlab`
(distlab/command.py) finds them.

Hugging Face also has a package `kernels`. Both must work in one environment, whichever is installed
first:

- A wheel leaves out our `kernels/__init__.py`, so that the two have no file in common. With theirs,
  our modules are in the folder of their package. Without theirs, `kernels` is a namespace package.
  Either can be uninstalled.
- An editable installation (`pip install -e .`) adds a finder that Python asks last. `import
  kernels` finds their package first, and `import kernels.rmsnorm` finds ours, because theirs has no
  module of that name.
- In a clone on `sys.path` before theirs, `kernels/__init__.py` makes way for theirs.
- Where theirs comes first in another folder of `sys.path`, `import distlab` adds a finder
  (distlab/__init__.py).

Another name in the wheel (`distlab.kernels`) would also avoid the clash. But a process that uses
both names would load each kernel twice, and torch refuses to register an operator twice.
"""

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py


class BuildWithoutKernelsInit(build_py):
    """Leave out `kernels/__init__.py`, which is the name of a file of Hugging Face's package."""

    def find_package_modules(self, package: str, package_dir: str) -> list[tuple[str, str, str]]:
        """Return (package, module, file) of each module of a package."""
        found = super().find_package_modules(package, package_dir)
        if package != "kernels":
            return found
        return [(name, module, file) for name, module, file in found if module != "__init__"]


commands = find_packages(include=["experiments*", "launch*"])
setup(
    packages=find_packages(include=["distlab*", "kernels*"])
    + [f"distlab.commands.{name}" for name in commands],
    package_dir={f"distlab.commands.{name}": name for name in ("experiments", "launch")},
    cmdclass={"build_py": BuildWithoutKernelsInit},
)
