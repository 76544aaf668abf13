"""Pictures of mixtures inside clients against the truth: shares, components, experts, samples."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from coterie.report.mixture_pictures import Numbers, open_page
from coterie.report.page import COLOURS, INK, MARKERS, SOFT


def shares_picture(true: Numbers, estimates: Mapping[str, Numbers], out: str | Path) -> Path:
    """Estimated against true share of the first component, a panel for each estimate."""
    with open_page(3.6 * len(estimates), 3.9, out) as page:
        grid = page.subplots(1, len(estimates), sharey=True, squeeze=False)[0]
        truth = [float(row[0]) for row in true]
        for place, (axes, (name, values)) in enumerate(zip(grid, estimates.items(), strict=True)):
            found = [float(row[0]) for row in values]
            error = sum(abs(a - b) for a, b in zip(found, truth, strict=True)) / len(truth)
            axes.plot([0, 1], [0, 1], color=SOFT, linewidth=1, zorder=1)
            axes.scatter(truth, found, s=22, color=COLOURS[place % 8], zorder=2)
            axes.set_title(f"{name}: mean error {error:.3f}", fontsize=11, loc="left")
            axes.set_xlabel("true share")
            axes.set_xlim(-0.03, 1.03)
            axes.set_ylim(-0.03, 1.03)
            axes.set_aspect("equal")
        grid[0].set_ylabel("estimated share of component 0")
    return Path(out)


def eigenvalue_picture(
    eigenvalues: Sequence[float], thresholds: Sequence[float], out: str | Path
) -> Path:
    """In how many directions clients differ, against what chance alone gives."""
    shown = [float(value) for value in eigenvalues[:12]]
    limits = [float(value) for value in thresholds[: len(shown)]]
    beyond = next((i for i, v in enumerate(limits) if shown[i] <= v), len(limits))
    with open_page(6.5, 3.6, out) as page:
        from matplotlib.ticker import LogLocator, NullFormatter

        axes = page.subplots()
        colours = [COLOURS[0] if i < beyond else "#B5B5B5" for i in range(len(shown))]
        axes.bar(range(1, len(shown) + 1), shown, color=colours, width=0.7)
        places = range(1, len(limits) + 1)
        axes.plot(places, limits, color=COLOURS[4], marker="_", label="99 % of chance")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")  # plain numbers: powers would be mathematics
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xticks(range(1, len(shown) + 1))
        axes.set_xlabel("direction")
        axes.set_ylabel("eigenvalue (1: chance)")
        word = "direction" if beyond == 1 else "directions"
        title = f"Clients differ in {beyond} {word}: {beyond + 1} components"
        axes.set_title(title, fontsize=11, loc="left")
        axes.legend(frameon=False)
    return Path(out)


def ternary_picture(true: Numbers, estimated: Numbers, out: str | Path) -> Path:
    """Shares of three components in a triangle; a line leads from the truth to the estimate."""
    corners = ((0.0, 0.0), (1.0, 0.0), (0.5, 3**0.5 / 2))

    def at(row: Sequence[float]) -> tuple[float, float]:
        return (
            sum(float(a) * x for a, (x, _) in zip(row, corners, strict=True)),
            sum(float(a) * y for a, (_, y) in zip(row, corners, strict=True)),
        )

    with open_page(5.4, 5.2, out) as page:
        axes = page.subplots()
        axes.set_axis_off()
        axes.grid(False)
        axes.plot(*zip(*corners, corners[0], strict=True), color=SOFT, linewidth=1)
        for one, other in zip(true, estimated, strict=True):
            axes.plot(*zip(at(one), at(other), strict=True), color="#B5B5B5", linewidth=1, zorder=1)
        axes.scatter(*zip(*map(at, true), strict=True), s=24, facecolor="white", edgecolor=INK,
                     label="true", zorder=2)  # fmt: skip
        axes.scatter(*zip(*map(at, estimated), strict=True), s=18, color=COLOURS[0],
                     label="estimated", zorder=3)  # fmt: skip
        for j, ((x, y), where) in enumerate(
            zip(corners, ((-0.02, -0.05), (0.02, -0.05), (0.0, 0.03)), strict=True)
        ):
            side = ("right", "left", "center")[j]
            axes.text(x + where[0], y + where[1], f"component {j}", ha=side)
        axes.set_aspect("equal")
        axes.legend(frameon=False, loc="upper left")
    return Path(out)


def experts_picture(rounds: Sequence[int], matrices: Sequence[Numbers], out: str | Path) -> Path:
    """Accuracy of each expert on each true component by round; a panel per component.

    `matrices[t][j][c]` is that of expert j on component c after `rounds[t]`.
    """
    k = len(matrices[0][0])
    with open_page(3.6 * k, 3.6, out) as page:
        grid = page.subplots(1, k, sharey=True, squeeze=False)[0]
        for c, axes in enumerate(grid):
            for j in range(len(matrices[0])):
                axes.plot(
                    rounds,
                    [float(one[j][c]) for one in matrices],
                    color=COLOURS[j % 8],
                    marker=MARKERS[j % 8],
                    markersize=4,
                    label=f"expert {j}",
                )
            axes.set_title(f"on component {c}", fontsize=11, loc="left")
            axes.set_xlabel("round")
        grid[0].set_ylabel("accuracy, %")
        grid[-1].legend(frameon=False, fontsize=9)
    return Path(out)


def samples_picture(by_round: Mapping[int, Any], out: str | Path) -> Path:
    """Samples drawn from each component's VAE by round: `by_round[t]` is [k, m, c, h, w] in 0..1.

    The same codes are decoded in every round, so a column changes only as its VAE learns.
    """
    rounds = list(by_round)
    first = by_round[rounds[0]]
    k, m, colours, height, width = (int(n) for n in first.shape)
    with open_page(0.9 + 0.45 * m * k, 0.7 + 0.45 * len(rounds), out) as page:
        grid = page.subplots(len(rounds), k, squeeze=False)
        for line, number in zip(grid, rounds, strict=True):
            for j, axes in enumerate(line):
                images = by_round[number][j].clamp(0, 1)  # [m, c, h, w]
                strip = images.permute(2, 0, 3, 1).reshape(height, m * width, colours)
                axes.imshow(
                    strip.squeeze(2) if colours == 1 else strip, cmap="gray", vmin=0, vmax=1
                )
                axes.set_xticks([])
                axes.set_yticks([])
                axes.grid(False)
                for spine in axes.spines.values():
                    spine.set_visible(False)
                if j == 0:
                    axes.set_ylabel(
                        f"round {number}", rotation=0, ha="right", va="center", fontsize=9
                    )
        for j, axes in enumerate(grid[0]):
            axes.set_title(f"component {j}", fontsize=11, loc="left")
    return Path(out)
