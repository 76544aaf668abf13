"""Pictures of mosaic: centres and balls of uncertainty by round, the path of merges, convergence.

The pictures do not use pyplot. Data with more than two features are projected on the two directions
in which the centres vary most; balls keep their true radius.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.core.errors import ConfigError
from coterie.report.page import COLOURS, DPI, INK, MARKERS, SOFT, STYLE, UNKNOWN
from coterie_lab.figures.frames import Frame

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Array = NDArray[Any]


def balls_picture(
    frames: Sequence[Frame], out: str | Path, samples: Array | None = None, panels: int = 6
) -> Path:
    """Draw some frames of a run side by side: the first, the last, and some between."""
    matplotlib = _matplotlib()
    chosen = _spread(frames, panels)
    columns = min(3, len(chosen))
    rows = math.ceil(len(chosen) / columns)
    plane, limits = _plane(frames, samples)
    with matplotlib.rc_context(STYLE):
        figure = _figure(4.2 * columns, 4.2 * rows + 0.5)
        for number, frame in enumerate(chosen, start=1):
            axes = figure.add_subplot(rows, columns, number)
            _draw(axes, frame, plane, limits, samples)
        figure.suptitle(_caption(frames), fontsize=13, x=0.02, ha="left")
        figure.tight_layout()
        path = Path(out)
        figure.savefig(path, dpi=DPI)
    return path


def balls_animation(
    frames: Sequence[Frame], out: str | Path, samples: Array | None = None, seconds: float = 0.7
) -> Path:
    """Draw all frames of a run as an animated GIF; needs Pillow."""
    matplotlib = _matplotlib()
    try:
        from PIL import Image
    except ImportError:
        raise ConfigError("An animation needs Pillow: pip install 'coterie[images]'.") from None
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    plane, limits = _plane(frames, samples)
    images = []
    with matplotlib.rc_context(STYLE):
        for frame in frames:
            figure = _figure(5.6, 5.6)
            _draw(figure.add_subplot(), frame, plane, limits, samples)
            figure.tight_layout()
            canvas = FigureCanvasAgg(figure)
            canvas.draw()
            images.append(Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3].copy()))
    path = Path(out)
    time = int(1000 * seconds)
    last = [time] * (len(images) - 1) + [4 * time]
    images[0].save(path, save_all=True, append_images=images[1:], duration=last, loop=0)
    return path


def path_picture(curve: Array, out: str | Path, criterion: str = "ICL", most: int = 40) -> Path:
    """Draw the criterion by number of groups; mark the chosen number and the second best.

    Parameters
    ----------
    curve
        [p, 3] number of groups, criterion, cost of the merge: `state.curve` of mosaic.
    most
        Largest number of groups shown.
    """
    matplotlib = _matplotlib()
    curve = np.asarray(curve)
    if not len(curve):
        raise ConfigError("path_picture: the run must have a path of merges. The curve is empty.")
    best = int(curve[:, 1].argmin())
    shown = curve[curve[:, 0] <= max(most, curve[best, 0] + 5)]
    order = shown[:, 1].argsort()
    low = shown[order[0], 1]
    with matplotlib.rc_context(STYLE):
        figure = _figure(7.5, 4.2)
        axes = figure.add_subplot()
        k, value = shown[:, 0], shown[:, 1] - low
        axes.plot(k, value, color=COLOURS[0], linewidth=1.6, marker="o", markersize=4)
        chosen = shown[order[0]]
        axes.plot(chosen[0], 0, marker="o", markersize=11, color=COLOURS[4], linestyle="")
        axes.annotate(
            f"chosen: {int(chosen[0])}",
            (chosen[0], 0),
            (0, -20),
            textcoords="offset points",
            ha="center",
            color=COLOURS[4],
            fontweight="bold",
        )
        if len(order) > 1:
            second = shown[order[1]]
            gap = second[1] - low
            side = 1 if second[0] > chosen[0] else -1
            axes.plot(second[0], gap, marker="s", markersize=9, color=COLOURS[2], linestyle="")
            axes.annotate(
                f"runner-up: {int(second[0])} (+{gap:.0f})",
                (second[0], gap),
                (side * 14, -14),
                textcoords="offset points",
                ha="left" if side > 0 else "right",
                color=COLOURS[2],
            )
        # Limit the axis, so that differences near the best value are visible.
        inner = np.sort(value)[: max(len(value) * 2 // 3, 3)].max()
        axes.set_ylim(-0.17 * inner, 1.15 * inner)
        axes.set_xlabel("number of groups")
        axes.set_ylabel(f"{criterion} above the best")
        axes.set_title("How many groups?", loc="left", fontsize=13)
        figure.tight_layout()
        path = Path(out)
        figure.savefig(path, dpi=DPI)
    return path


def convergence_picture(curves: Mapping[str, Array], out: str | Path) -> Path:
    """Draw distances to the fixed point by round on a log scale; lines are linear convergence.

    Parameters
    ----------
    curves
        Distance after each round by name; a name that ends in "alone" is dashed, in the colour of
        the line before it.
    """
    matplotlib = _matplotlib()
    with matplotlib.rc_context(STYLE):
        figure = _figure(7.5, 4.4)
        axes, colour = figure.add_subplot(), -1
        for name, values in curves.items():
            alone = name.endswith("alone")
            colour += not alone
            shown = np.where(np.asarray(values) > 0, values, np.nan)
            axes.plot(
                np.arange(1, len(shown) + 1),
                shown,
                linestyle="--" if alone else "-",
                marker="" if alone else MARKERS[colour % len(MARKERS)],
                markersize=4,
                linewidth=1.6,
                color=COLOURS[colour % len(COLOURS)],
                label=name,
            )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:.0e}")  # plain text instead of mathematics
        axes.set_xlabel("round")
        axes.set_ylabel("farthest centre, in standard deviations")
        axes.set_title("Distance to the fixed point", loc="left", fontsize=13)
        axes.legend(frameon=False, fontsize=9)
        figure.tight_layout()
        path = Path(out)
        figure.savefig(path, dpi=DPI)
    return path


def _matplotlib() -> Any:
    try:
        import matplotlib
    except ImportError:
        raise ConfigError("Pictures need matplotlib: pip install 'coterie[plot]'.") from None
    return matplotlib


def _figure(width: float, height: float) -> "Figure":
    from matplotlib.figure import Figure

    return Figure((width, height), facecolor="white")


def _spread(frames: Sequence[Frame], panels: int) -> list[Frame]:
    """Select the first and the last frame and some between, with every stage if possible."""
    if not frames:
        raise ConfigError("There must be at least one frame to draw.")
    stages: dict[str, int] = {}
    for i, frame in enumerate(frames):
        stages[frame.title.split()[0]] = i  # the last of each stage
    wanted = {0, *stages.values()}
    rounds = [i for i, frame in enumerate(frames) if frame.title.startswith("round")]
    for i in rounds[1:]:
        if len(wanted) >= panels:
            break
        wanted.add(i)
    return [frames[i] for i in sorted(wanted)[-panels:]]


def _plane(frames: Sequence[Frame], samples: Array | None) -> tuple[Array, tuple[Array, Array]]:
    """The two directions of the plane, and the part of it that is shown."""
    centres = np.concatenate([frame.centres for frame in frames])
    d = centres.shape[1]
    if d == 1:
        plane = np.array([[1.0, 0.0]])
    elif d == 2:
        plane = np.eye(2)
    else:
        _, vectors = np.linalg.eigh(np.cov(centres.T))
        plane = vectors[:, ::-1][:, :2]
    points = (centres if samples is None else np.concatenate([centres, samples])) @ plane
    low, high = np.quantile(points, [0.002, 0.998], axis=0)
    middle, half = (low + high) / 2, 0.58 * float((high - low).max()) + 1e-9
    return plane, (middle - half, middle + half)


def _draw(
    axes: "Axes", frame: Frame, plane: Array, limits: tuple[Array, Array], samples: Array | None
) -> None:
    from matplotlib.patches import Circle

    if samples is not None:
        x = samples @ plane
        axes.plot(x[:, 0], x[:, 1], ".", color=UNKNOWN, markersize=1.5, zorder=0)
    points = frame.centres @ plane
    for (a, b), radius, client, group in zip(
        points, frame.radii, frame.client, frame.group, strict=True
    ):
        colour = COLOURS[int(group if group >= 0 else client) % len(COLOURS)]
        marker = MARKERS[int(client) % len(MARKERS)]
        if radius > 0:
            axes.add_patch(Circle((a, b), radius, facecolor=colour, alpha=0.14, edgecolor="none"))
            axes.add_patch(Circle((a, b), radius, fill=False, edgecolor=colour, linewidth=0.9))
        axes.plot(a, b, marker, color=colour, markersize=7.5, markeredgecolor="white", zorder=3)
    if len(frame.merged):
        merged = frame.merged @ plane
        axes.plot(
            merged[:, 0], merged[:, 1], "+", color=INK, markersize=15, markeredgewidth=1.8, zorder=5
        )
    axes.set_xlim(limits[0][0], limits[1][0])
    axes.set_ylim(limits[0][1], limits[1][1])
    axes.set_aspect("equal")
    count = f", {len(frame.merged)} groups" if len(frame.merged) else ""
    axes.set_title(f"{frame.title}{count}", loc="left", fontsize=11, color=SOFT)


def _caption(frames: Sequence[Frame]) -> str:
    clients = len(set(np.concatenate([frame.client for frame in frames]).tolist()))
    groups = len(frames[-1].merged)
    return f"{groups} groups in the data of {clients} clients (marker: client, cross: group)"
