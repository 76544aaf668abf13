"""Studies on problems whose truth is known: `python -m coterie_lab.studies.<name> --help`."""
