"""What may be wrong with the data of a federation: each warning in one line.

A warning has the column, the figure and what to do. They are in `data.warnings`, and in the data
card of a run (`final/data.json`).
"""

from typing import NamedTuple


class DataWarning(NamedTuple):
    """Something that may spoil a project.

    >>> print(DataWarning("identifier", "id", "Column 'id' counts rows. Leave it out."))
    Column 'id' counts rows. Leave it out.
    """

    kind: str  # "repeats", ...
    column: str | None  # None: not about one column
    text: str  # column, figure and what to do, in one line

    def __str__(self) -> str:
        return self.text
