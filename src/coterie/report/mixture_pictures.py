"""The shares of components in clients, as a picture."""

from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from coterie.report.page import COLOURS, DPI, INK, use_style

Numbers = Sequence[Sequence[float]]


@contextmanager
def open_page(width: float, height: float, out: str | Path) -> Any:
    """An empty page that is written when it is left."""
    with use_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        page = Figure(figsize=(width, height), dpi=DPI, facecolor="white", layout="constrained")
        FigureCanvasAgg(page)
        yield page
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        page.savefig(out)


def proportions_picture(
    names: Sequence[str], shares: Numbers, errors: Numbers, out: str | Path
) -> Path:
    """Every client's shares as a bar, ordered by the first component, with standard errors."""
    order = sorted(range(len(shares)), key=lambda i: -float(shares[i][0]))
    with open_page(6.5, 1.4 + 0.2 * len(order), out) as page:
        axes = page.subplots()
        left = [0.0] * len(order)
        for j in range(len(shares[0])):
            width = [float(shares[i][j]) for i in order]
            bars = [float(errors[i][j]) for i in order] if j == 0 else None
            look = {"ecolor": INK, "error_kw": {"elinewidth": 0.9}} if bars else {}
            axes.barh(
                range(len(order)),
                width,
                left=left,
                xerr=bars,
                color=COLOURS[j % 8],
                label=f"component {j}",
                height=0.8,
                **look,
            )
            left = [a + b for a, b in zip(left, width, strict=True)]
        axes.set_yticks(range(len(order)), [names[i] for i in order], fontsize=8)
        axes.set_ylim(len(order) - 0.4, -0.6)
        axes.set_xlim(0, 1)
        axes.set_xlabel("share of the client's samples; bars: standard error of component 0")
        axes.legend(frameon=False, ncols=len(shares[0]), loc="lower left", bbox_to_anchor=(0, 1))
    return Path(out)
