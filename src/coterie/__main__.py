"""`python -m coterie` is the command `coterie`."""

from coterie.cli import main

if __name__ == "__main__":
    main()
