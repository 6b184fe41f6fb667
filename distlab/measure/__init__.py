"""Instruments that look at any strategy from outside: clocks, memory, collectives, the profiler's trace."""
