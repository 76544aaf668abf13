"""Pages about a run: one file to hand over, and the same page while the run goes on."""

from coterie.report.html.contents import Contents, contents_of, read_contents
from coterie.report.html.page import render, write_report

__all__ = ["Contents", "contents_of", "read_contents", "render", "write_report"]
