"""Recipes: experiments as runs, and what can be run at all."""
