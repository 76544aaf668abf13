"""Census: the method in `census.py`, its mathematics in the other files."""

from coterie.algorithms.census.census import Census

__all__ = ["Census"]
