"""Blend: ours, grown out of FedGMI. Read `blend.py` first; the other files are its mathematics."""

from coterie.algorithms.blend.blend import Blend

__all__ = ["Blend"]
