"""Running methods: the loop, evaluation, the run folder, progress."""
