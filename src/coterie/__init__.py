"""Clustered federated learning: find the hidden groups of a federation, train a model for each."""

__version__ = "0.1.0.dev0"
