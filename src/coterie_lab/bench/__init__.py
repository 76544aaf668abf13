"""How fast it is: workloads, the loop everybody writes, our engine, and what others take."""
