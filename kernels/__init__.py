"""Triton kernels, one operation per file.

This file imports none of them: import the submodules that you need.

Hugging Face's package is also called `kernels`. If it is installed, and a clone of this repository
comes before it on `sys.path`, this file makes way: `import kernels` then gives their package, with
this folder added to its path. So both `import kernels.rmsnorm` and `from kernels import get_kernel`
work. setup.py explains what happens in an installation.
"""

import importlib.metadata
import importlib.util
import sys
from pathlib import Path


def _make_way() -> None:
    """Replace this module by the package of the distribution `kernels`, if that is installed."""
    try:
        distribution = importlib.metadata.distribution("kernels")
    except importlib.metadata.PackageNotFoundError:
        return
    theirs = Path(distribution.locate_file("kernels/__init__.py"))
    if not theirs.is_file():
        return
    spec = importlib.util.spec_from_file_location(__name__, theirs)
    package = importlib.util.module_from_spec(spec)
    # First in the path: their folder may also contain the kernels of an installed distlab, and the
    # clone takes precedence.
    package.__path__.insert(0, str(Path(__file__).parent))
    # Before their code runs, because it imports its own submodules by this name. When this file
    # ends, Python takes the entry as the result of `import kernels`.
    sys.modules[__name__] = package
    spec.loader.exec_module(package)


_make_way()
