"""Tables for people: plain text for terminals, HTML for notebooks, CSV for everything else."""

import csv
import html
import io
import math
import numbers
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError, unknown

Formats = Mapping[str, str]
HTML_ROWS = 100  # a notebook cell longer than this is scrolled past, not read


@dataclass(frozen=True, repr=False)
class Table:
    """Rows under named columns.

    Parameters
    ----------
    formats
        How a column is shown, as a format specification: ``{"accuracy": ".1%"}``. Values stay
        as they are; only text and HTML are formatted.

    >>> table = Table(["client", "accuracy"], [["a", 0.9], ["b", None]], {"accuracy": ".1%"})
    >>> print(table)
    client  accuracy
    ------  --------
    a          90.0%
    b
    >>> table["accuracy"]
    [0.9, None]
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]
    formats: Formats = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Rows, each by column name."""
        return (dict(zip(self.columns, row, strict=True)) for row in self.rows)

    def __getitem__(self, column: str) -> list[Any]:
        """A column by its name."""
        if column not in self.columns:
            raise ConfigError(unknown("column", str(column), self.columns))
        place = list(self.columns).index(column)
        return [row[place] for row in self.rows]

    def __repr__(self) -> str:
        return f"Table({len(self.rows)} rows: {', '.join(self.columns)})"

    def __str__(self) -> str:
        return text_table(self.columns, self.rows, self.formats)

    def _repr_html_(self) -> str:
        return html_table(self.columns, self.rows, self.formats)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Comma-separated text with values unrounded; written to a file too, if one is named."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows([_bare(value) for value in row] for row in self.rows)
        if path is not None:
            Path(path).write_text(text.getvalue(), encoding="utf-8")
        return text.getvalue()

    def to_pandas(self) -> Any:
        """A pandas DataFrame."""
        try:
            import pandas
        except ImportError as error:
            raise ConfigError(
                "Table: to_pandas needs pandas, which is not installed. "
                "Install it with: pip install 'coterie[tables]'"
            ) from error
        return pandas.DataFrame([list(row) for row in self.rows], columns=list(self.columns))

    def to_frame(self) -> Any:
        """A pandas DataFrame if pandas is installed, else this table."""
        try:
            return self.to_pandas()
        except ConfigError:
            return self


def text_table(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], formats: Formats | None = None
) -> str:
    """Aligned plain text: words to the left, numbers to the right.

    >>> print(text_table(["site", "clients"], [["north", 12], ["south", 7]]))
    site   clients
    -----  -------
    north       12
    south        7
    """
    cells = _cells(columns, rows, formats)
    head = [_printable(name) for name in columns]
    right = _numeric(columns, rows)
    widths = [max(map(_width, parts)) for parts in zip(head, *cells, strict=True)]
    lines = [head, ["-" * width for width in widths], *cells]
    return "\n".join(
        "  ".join(_pad(*part) for part in zip(line, widths, right, strict=True)).rstrip()
        for line in lines
    )


def html_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    formats: Formats | None = None,
    most: int = HTML_ROWS,
) -> str:
    """An HTML table that needs no style sheet; past `most` rows it says how many are left out.

    >>> "&lt;b&gt;" in html_table(["client"], [["<b>"]])
    True
    """
    right = _numeric(columns, rows)
    head = _html_row("th", columns, right, "border-bottom:1px solid #999;font-weight:600;")
    body = "".join(_html_row("td", row, right) for row in _cells(columns, rows[:most], formats))
    if len(rows) > most:
        rest = f"and {len(rows) - most:,} more rows"
        body += f'<tr><td colspan="{len(columns)}" style="padding:2px 12px">{rest}</td></tr>'
    style = "border-collapse:collapse;font-variant-numeric:tabular-nums"
    return f'<table style="{style}"><thead>{head}</thead><tbody>{body}</tbody></table>'


def _html_row(tag: str, cells: Sequence[str], right: Sequence[bool], style: str = "") -> str:
    out = []
    for cell, number in zip(cells, right, strict=True):
        side = "right" if number else "left"
        look = f"{style}text-align:{side};padding:2px 12px"
        out.append(f'<{tag} style="{look}">{html.escape(_printable(cell))}</{tag}>')
    return f"<tr>{''.join(out)}</tr>"


def _cells(
    columns: Sequence[str], rows: Sequence[Sequence[Any]], formats: Formats | None
) -> list[list[str]]:
    formats = formats or {}
    return [
        [
            format_value(value, formats.get(name, ""))
            for name, value in zip(columns, row, strict=True)
        ]
        for row in rows
    ]


def format_value(value: Any, format: str = "") -> str:
    """A value as people read it; nothing for what is missing.

    >>> [format_value(value) for value in (0.123456, True, None, float("nan"))]
    ['0.1235', 'yes', '', '']
    >>> format_value(0.5, ".0%")
    '50%'
    """
    if _missing(value):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, numbers.Real) and format:
        return f"{value:{format}}"
    if isinstance(value, numbers.Real) and not isinstance(value, numbers.Integral):
        return f"{value:.4g}" if abs(float(value)) < 1e4 else f"{value:,.0f}"
    return _printable(str(value))


def _missing(value: Any) -> bool:
    return value is None or (isinstance(value, numbers.Real) and math.isnan(value))


def _bare(value: Any) -> Any:
    """A value for a CSV file."""
    return format_value(value) if _missing(value) or isinstance(value, bool) else value


def _numeric(columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> list[bool]:
    """Which columns hold numbers and nothing else."""
    out = []
    for place in range(len(columns)):
        values = [row[place] for row in rows if not _missing(row[place])]
        kinds = [isinstance(v, numbers.Real) and not isinstance(v, bool) for v in values]
        out.append(bool(values) and all(kinds))
    return out


def _printable(text: str) -> str:
    """Text that cannot break a line or steer a terminal."""
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _width(text: str) -> int:
    """Columns of a terminal that a text takes: two for wide letters, none for combining marks."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    return len(text) + wide - sum(unicodedata.combining(letter) > 0 for letter in text)


def _pad(text: str, width: int, right: bool) -> str:
    room = " " * (width - _width(text))
    return room + text if right else text + room
