"""Studies on problems with known groups: `python -m coterie_lab.studies.<name> --help`."""
