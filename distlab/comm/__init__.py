"""Ranks and what they say to each other: the rank context and the collectives."""

from distlab.comm.context import RankContext, RankEnvironment, rank_context

__all__ = ["RankContext", "RankEnvironment", "rank_context"]
