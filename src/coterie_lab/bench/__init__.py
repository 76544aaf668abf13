"""The benchmark: the time of a round in our engine, in a plain loop and in other packages."""
