"""What a partition did: samples of every client, and which labels they are."""

from pathlib import Path
from typing import Any

from coterie.report.page import DPI, INK, use_style

DRAWN = ("train", "test")
MOST = 120  # clients that fit on a picture; of more, evenly spaced ones are drawn


def data_picture(data: Any, out: str | Path) -> Path:
    """Draw a federation to a PNG: a line per client, in the order of the true groups."""
    out = Path(out)
    import torch

    n = len(data)
    order = torch.arange(n) if data.truth is None else data.truth.argsort(stable=True)
    shown = order[torch.linspace(0, n - 1, min(n, MOST)).long()]
    train, test = (data.sizes(split)[shown].tolist() for split in DRAWN)
    labelled = [s for s in DRAWN if sum(data.sizes(s))] if data.task == "classification" else []
    with use_style():
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        height = max(3.2, 1.6 + 0.14 * len(shown))
        width = 6 + 5 * len(labelled)
        page = Figure(figsize=(width, height), dpi=DPI, layout="constrained")
        FigureCanvasAgg(page)
        whole = f" ({len(shown)} of them drawn)" if len(shown) < n else ""
        page.suptitle(f"{data.name or 'Data'}: {n} clients{whole}", color=INK, fontsize=13)
        grid = page.subplots(1, 1 + len(labelled), sharey=True, squeeze=False)[0]
        places = range(len(shown))
        bars = grid[0]
        bars.barh(places, train, color="#0072B2", label="train")
        bars.barh(places, test, left=train, color="#56B4E9", label="test")
        bars.set_title("samples", fontsize=11, loc="left")
        bars.set_ylabel("client, by true group" if data.truth is not None else "client")
        bars.legend(
            frameon=False, fontsize=9, ncols=2, loc="lower right", bbox_to_anchor=(1.0, 1.0)
        )
        bars.set_ylim(len(shown) - 0.5, -0.5)
        bars.set_yticks([])
        shares = [_shares(data, split, shown) for split in labelled]
        for axes, split, own in zip(grid[1:], labelled, shares, strict=True):
            image = _labels(axes, data, own, max(float(own.max()) for own in shares))
            axes.set_title(f"shares of labels, {split}", fontsize=11, loc="left")
        if labelled:
            page.colorbar(image, ax=grid[-1], shrink=0.7)
        if data.truth is not None:
            _groups(grid, data.truth[shown])
        out.parent.mkdir(parents=True, exist_ok=True)
        page.savefig(out)
    return out


def _shares(data: Any, split: str, shown: Any) -> Any:
    """Which share of a client's samples each label is: [clients, labels]."""
    import torch

    rows = data.rows[split].of_clients(shown)
    counts = torch.zeros(len(shown), data.n_outputs)
    y = data.y[rows.index].long()
    counts.index_put_((rows.owner, y), torch.ones(len(y)), accumulate=True)
    return counts / counts.sum(1, keepdim=True).clamp(min=1)


def _labels(axes: Any, data: Any, shares: Any, most: float) -> Any:
    image = axes.imshow(
        shares.tolist(), aspect="auto", cmap="viridis", vmin=0, vmax=most, interpolation="nearest"
    )
    axes.grid(False)
    names = data.classes or [str(c) for c in range(data.n_outputs)]
    if data.n_outputs <= 30:
        turned = 90 if max(map(len, names)) > 2 else 0
        axes.set_xticks(range(data.n_outputs), names, rotation=turned, fontsize=9)
    return image


def _groups(grid: Any, truth: Any) -> None:
    """Lines between the true groups."""
    for place in (truth[1:] != truth[:-1]).nonzero().flatten().tolist():
        for axes in grid:
            axes.axhline(place + 0.5, color="white", linewidth=2.5)
            axes.axhline(place + 0.5, color="#D55E00", linewidth=0.8)
