"""The names of `distlab.comm` for editors and the documentation, which do not run `__getattr__`."""

from distlab.comm.context import RankContext as RankContext
from distlab.comm.context import RankEnvironment as RankEnvironment
from distlab.comm.context import rank_context as rank_context
