"""Running methods: the loop, the exam, the run folder, progress."""
