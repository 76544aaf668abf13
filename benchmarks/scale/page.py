"""The tables and the picture of docs/scaling.md, from the stored lines.

python benchmarks/scale/page.py docs/scaling.png
"""

import argparse
from pathlib import Path
from typing import Any

from common import stored

from coterie.report.page import COLOURS, SOFT, axes_at, new_page, use_style

LINES = {
    "round-{m}-ifca": "round of IFCA",
    "round-{m}-clove": "round of CLoVE",
    "kmeans-{m}-10": "CLoVE's clustering on the server, 10 groups",
    "survey-{m}-16": "survey",
}
SIZES = (10**4, 10**5, 10**6)


def table() -> list[str]:
    """Seconds and memory by number of clients, as Markdown."""
    found = stored("million")
    out = ["| | " + " | ".join(f"{m:,} clients" for m in SIZES) + " |", "|---" * 4 + "|"]
    labels = {**LINES, "kmeans-{m}-4": "CLoVE's clustering on the server, 4 groups"}
    for name, label in labels.items():
        cells = []
        for m in SIZES:
            line = found.get(name.format(m=m), {})
            if "seconds" in line:
                cells.append(f"{line['seconds']:g} s, {line['memory'] / 1000:.1f} GB")
            else:
                cells.append("not measured")
        out.append(f"| {label} | " + " | ".join(cells) + " |")
    return out


def plans() -> list[str]:
    """Plan and measured, as Markdown."""
    out = ["| setting | time | memory | bytes |", "|---" * 4 + "|"]
    for name, line in stored("plan").items():
        if "ratios" not in line:
            continue
        time = f"{line['plan']['seconds_a_round']:.2g} / {line['measure']['seconds_a_round']:.2g} s"
        memory = [sum(line[what]["memory"].values()) / 1e6 for what in ("plan", "measure")]
        traffic = [line[what]["bytes_a_round"] / 1e3 for what in ("plan", "measure")]
        ratio = line["ratios"]
        out.append(
            f"| {name} | {time} ({ratio['seconds']:.2f}) | {memory[0]:,.0f} / {memory[1]:,.0f} MB "
            f"({ratio['memory']:.2f}) | {traffic[0]:,.1f} / {traffic[1]:,.1f} kB "
            f"({ratio['bytes']:.2f}) |"
        )
    return out


def draw(path: Path) -> None:
    """Seconds and memory against the number of clients."""
    found = stored("million")
    with use_style():
        page = new_page(9, 4.4)
        left, right = axes_at(page, 0.7, 1.3, 3.6, 2.6), axes_at(page, 5.2, 1.3, 3.6, 2.6)
        for colour, (name, label) in zip(COLOURS, LINES.items(), strict=False):
            lines = {m: found.get(name.format(m=m), {}) for m in SIZES}
            known = [m for m in SIZES if "seconds" in lines[m]]
            look: dict[str, Any] = {"marker": "o", "color": colour, "label": label}
            left.plot(known, [lines[m]["seconds"] for m in known], **look)
            right.plot(known, [lines[m]["memory"] / 1000 for m in known], **look)
        for axis, title in ((left, "seconds of one core"), (right, "memory, GB")):
            axis.set(xscale="log", yscale="log", xlabel="clients", title=title)
            for side in (axis.xaxis, axis.yaxis):
                side.set_major_formatter(lambda value, _: f"{value:,.10g}")
                side.set_minor_formatter(lambda value, _: "")
            axis.set_xlim(7e3, 1.4e6)
        right.axhline(24, color=SOFT, linestyle=":")
        right.text(SIZES[0], 25.5, "this machine", color=SOFT, fontsize=9)
        right.set_ylim(0.3, 45)
        page.legend(*left.get_legend_handles_labels(), loc="lower center", ncols=2, frameon=False)
        page.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("picture", type=Path, nargs="?")
    options = parser.parse_args()
    print("\n".join([*table(), "", *plans()]))
    if options.picture is not None:
        draw(options.picture)


if __name__ == "__main__":
    main()
