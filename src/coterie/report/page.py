"""The paper pictures are drawn on: colours, style, a page and axes on it.

Figures of their own, without pyplot, so that nothing outside is touched and no display is needed.
Sizes are in inches.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coterie.core.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's colours for all kinds of colour vision; yellow, too pale on white, and black
# are replaced by wine (Tol's "muted") and grey.
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#D55E00", "#56B4E9", "#882255", "#666666")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
DASHES = ("-", (0, (5, 1.6)), (0, (1.2, 1.4)), (0, (6, 1.5, 1.2, 1.5)))
INK, SOFT, FAINT, UNKNOWN = "#222222", "#666666", "#E3E3E3", "#B5B5B5"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 11,
    "text.color": INK,
    "text.parse_math": False,  # a folder may have a dollar sign in its name
    "axes.edgecolor": "#999999",
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.major.size": 0,
    "ytick.major.size": 0,
}
ENDINGS = (".png", ".svg", ".pdf")
DPI = 100


@contextmanager
def use_style() -> Iterator[None]:
    """The style of all pictures; says what to install where it cannot be drawn."""
    try:
        from matplotlib import rc_context
    except ImportError as error:
        raise ConfigError(
            "Picture: matplotlib is needed and not installed. "
            "Install it with: pip install 'coterie[plot]'"
        ) from error
    with rc_context(STYLE):
        yield


def draw(figure: "Callable[[], Figure]", out: str | Path) -> Path:
    """Draw a figure in the style of all pictures, to a file."""
    out = Path(out)
    if out.suffix.lower() not in ENDINGS:
        raise ConfigError(f"Picture: the file must end in {', '.join(ENDINGS)}. Got {out.name!r}.")
    with use_style():
        out.parent.mkdir(parents=True, exist_ok=True)
        figure().savefig(out)
    return out


def new_page(width: float, height: float) -> "Figure":
    """An empty figure of some inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    page = Figure(figsize=(width, height), dpi=DPI, facecolor="white")
    FigureCanvasAgg(page)
    return page


def axes_at(page: "Figure", left: float, bottom: float, width: float, height: float) -> "Axes":
    """Axes at a place given in inches."""
    w, h = page.get_size_inches()
    return page.add_axes((left / w, bottom / h, width / w, height / h))


def text_width(page: "Figure", text: str, **look: Any) -> float:
    """Inches that a text takes."""
    artist = page.text(0, 0, text, **look)
    width = artist.get_window_extent().width / page.dpi
    artist.remove()
    return float(width)


def add_heading(ax: "Axes", title: tuple[str, str]) -> None:
    """A bold line, and a quiet one under it."""
    above: dict[str, Any] = {"xycoords": "axes fraction", "textcoords": "offset points"}
    ax.annotate(title[0], (0, 1), (0, 27), fontsize=13, fontweight="bold", **above)
    ax.annotate(title[1], (0, 1), (0, 11), color=SOFT, **above)
