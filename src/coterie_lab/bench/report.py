"""Show measured figures as tables and as a picture."""

from pathlib import Path
from typing import Any

from coterie_lab.bench.measure import FOREIGN
from coterie_lab.bench.variants import WHAT
from coterie_lab.bench.workloads import NAMES


def table(names: list[str], lines: list[list[Any]]) -> str:
    """A table in Markdown."""
    rows = [names, ["---"] * len(names), *lines]
    return "\n".join("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)


def seconds(value: float | None) -> str:
    """Format a time in a suitable unit.

    >>> seconds(0.0123), seconds(1.5), seconds(None)
    ('12.3 ms', '1.50 s', '-')
    """
    if value is None:
        return "-"
    return (
        f"{value * 1000:.3g} ms"
        if value < 1
        else f"{value:.3g} s"
        if value >= 10
        else f"{value:.2f} s"
    )


def _part(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.0f} %"


def _memory(found: dict[str, Any]) -> str:
    peak = found.get("memory", {}).get("peak_mb")
    return "-" if peak is None else f"{peak:.0f} MB"


def block(key: str, found: dict[str, Any]) -> str:
    """One workload as a table with one line per variant."""
    name = key.partition("@")[0]
    if "error" in found:
        return f"**{key}** could not be measured: {found['error']}."
    head = (
        f"**{key}** {found['title']}. {found['clients']:,} clients timed, {found['gflop']:.3g} "
        f"GFLOP per round, threads: {found['threads']}, peak of the machine "
        f"{found['peak_gflops']:.0f} GFLOP/s."
    )
    lines = []
    for variant, v in found["variants"].items():
        if "seconds" not in v:
            lines.append([variant, v.get("absent") or v.get("error"), "", "", "", "", "", ""])
            continue
        lines.append(
            [
                variant,
                seconds(v["seconds"]),
                f"x{v['ratio']:.2f}",
                _part(v["peak_fraction"]),
                _part(v["spread"]),
                _part(v["foreign"]) + (" *disturbed*" if (v["foreign"] or 0) > FOREIGN else ""),
                f"{v['agreement']['largest']:.0e}",
                _memory(v),
            ]
        )
    names = ["variant", "time per round", "speed-up", "share of peak", "spread", "other load"]
    names += ["difference", "memory"]
    assert name in NAMES
    return f"{head}\n\n{table(names, lines)}"


def extra(name: str, found: dict[str, Any]) -> str:
    """A further measurement as text."""
    if "error" in found:
        return f"**{name}** could not be measured: {found['error']}."
    if name == "server":
        return _server(found)
    if name == "scale100k":
        first, setup = seconds(found["first_round_seconds"]), seconds(found["setup_seconds"])
        return (
            f"**{name}** CLoVE with 10 models of W9, {found['clients']:,} clients of which "
            f"{found['cohort']:,} take part in a round, threads: {found['threads']}. Time per "
            f"round {seconds(found['seconds'])} (first round {first}), setup {setup}, peak memory "
            f"{found['peak_mb']:.0f} MB (libraries {found['libraries_mb']:.0f} MB, data "
            f"{found['data_mb']:.0f} MB)."
        )
    memory = found["memory"]
    if "error" in memory:
        return f"**{name}** could not be measured: {memory['error']}."
    text = (
        f"**{name}** IFCA on rotated digits, {memory['clients']:,} clients with "
        f"{memory['samples']} samples. Time per round {seconds(memory['seconds'])}, of which "
        f"{seconds(memory['loading_seconds'])} for loading data; stored data "
        f"{memory['at_rest_mb']:.0f} MB, peak memory {memory['peak_mb']:.0f} MB (libraries "
        f"{memory['libraries_mb']:.0f} MB)."
    )
    round_ = found.get("round", {})
    if "error" in round_:
        return f"{text} The comparison with the plain loop failed: {round_['error']}."
    if "variants" in round_:
        lines = [
            [n, seconds(v["seconds"]), f"x{v['ratio']:.2f}", f"{v['hours_for_300_rounds']:.2f} h"]
            if "seconds" in v
            else [n, v.get("error", v.get("absent")), "", ""]
            for n, v in round_["variants"].items()
        ]
        text += "\n\n" + table(["variant", "time per round", "speed-up", "300 rounds"], lines)
    return text


def _server(found: dict[str, Any]) -> str:
    lines = []
    words = {"cluster": "k-means", "choice": "choice of K", "matching": "matching"}
    mean = found["mean"]
    for name, v in mean.get("variants", {}).items():
        lines.append([f"mean by group, {name}", seconds(v["seconds"]), f"x{v['ratio']:.2f}", ""])
    if "error" in mean:
        lines.append(["mean by group", mean["error"], "", ""])
    for part, word in words.items():
        v = found[part]
        if "error" in v:
            lines.append([word, f"failed: {v['error']}", "", ""])
            continue
        if v.get("rows", v.get("clients")) != v.get("clients"):
            word += f" (on a sample of {v['rows']:,})"
        lines.append([word, seconds(v["seconds"]), "", f"{v['peak_mb']:.0f} MB"])
    clients = mean.get("clients", 0)
    return f"**W8** The server only, {clients:,} clients, 10 groups, 10,000 weights.\n\n" + table(
        ["part", "time", "speed-up", "memory"], lines
    )


def growth(results: dict[str, Any]) -> str:
    """The time per round for different sizes."""
    lines = []
    for size, found in results.items():
        if "error" in found:
            lines.append([size, f"failed: {found['error']}", "", ""])
            continue
        pairs = zip(found["sizes"], found["seconds"], strict=True)
        lines.append(
            [
                found["what"],
                ", ".join(f"{n:,}: {seconds(t)}" for n, t in pairs),
                seconds(found["start"]),
                _part(found["deviation"]),
            ]
        )
    names = ["size", "time per round", "fixed cost", "largest deviation from the line"]
    return table(names, lines)


def peers(results: dict[str, Any]) -> str:
    """The time per round of other packages and ours."""
    lines = []
    for name, found in results.items():
        if "error" in found:
            lines.append([name, "", f"not measured: {found['error']}", "", "", ""])
            continue
        for work, v in found.items():
            if not isinstance(v, dict):
                continue
            if "error" in v:
                lines.append([found["package"], work, f"not measured: {v['error']}", "", "", ""])
                continue
            ours, ratio = v.get("ours_seconds"), v.get("ratio")
            lines.append(
                [
                    found["package"],
                    work,
                    seconds(v["seconds"]),
                    seconds(v["first_seconds"]),
                    seconds(ours),
                    "-" if ratio is None else f"x{ratio:.1f}",
                ]
            )
    names = ["package", "workload", "time per round", "first round", "ours", "our speed-up"]
    return table(names, lines)


def goals(lines: list[dict[str, Any]]) -> str:
    """The goals, and the figures that were reached."""

    def show(line: dict[str, Any], value: float | None) -> str:
        if value is None:
            return "not measured"
        if line["measure"].endswith("_mb"):
            return f"{value:.0f} MB"
        if line["measure"] in ("peak_fraction", "deviation"):
            return _part(value)
        return f"x{value:.2f}"

    words = {
        "ratio": "speed-up over the plain loop",
        "peak_fraction": "share of the peak",
        "deviation": "deviation from a line",
        "at_rest_mb": "stored data",
        "peak_mb": "peak memory",
    }
    rows = [
        [
            line["where"],
            line["kind"],
            "speed-up over the package" if line["kind"] == "peer" else words[line["measure"]],
            ("at most " if line["at_most"] else "") + show(line, line["goal"]),
            show(line, line["reached"]),
            line["by"],
            "yes" if line["met"] else "nearly" if line.get("close") else "**no**",
        ]
        for line in lines
    ]
    return table(["workload", "kind", "measure", "goal", "reached", "variant", "met"], rows)


def markdown(results: dict[str, Any]) -> str:
    """All figures in Markdown."""
    machine, settings = results["machine"], results["settings"]
    text = (
        f"{machine['processor']}, {machine['cores']} cores, {machine['memory_gb']:.0f} GB; torch "
        f"{machine['torch']}, Python {machine['python']}. Medians of {settings['repeats']} "
        f"samples; all variants in turn in one process. Images: {results['data']}."
    )
    if settings["scale"] != 1:
        share = f"{settings['scale']:g}"
        text += f" **A trial with {share} of the clients; the figures are not comparable.**"
    parts = [text]
    parts += [block(key, found) for key, found in results["workloads"].items()]
    parts += [extra(name, found) for name, found in results["extras"].items()]
    if results.get("growth"):
        parts += ["Growth of the time per round", growth(results["growth"])]
    if results.get("peers"):
        parts += ["Other packages", peers(results["peers"])]
    if results.get("goals"):
        parts += ["Goals (nearly: at least 85 %)", goals(results["goals"])]
    return "\n\n".join(parts) + "\n"


def picture(results: dict[str, Any], path: Path) -> bool:
    """Draw speed-ups as bars and growth as lines.

    Returns False if there is nothing to draw or matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        return False

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    works = {k: v for k, v in results["workloads"].items() if "variants" in v}
    names = [n for n in WHAT if n != "plain" and any(_has_time(v, n) for v in works.values())]
    curves = {k: v for k, v in results.get("growth", {}).items() if "seconds" in v}
    columns = bool(works) + bool(curves)
    if not columns:
        return False
    tall = max(3.0, 0.9 + 0.16 * (len(names) + 1) * len(works))
    figure, axes = plt.subplots(
        1, columns, figsize=(7.5 * columns, min(tall, 16)), squeeze=False, layout="constrained"
    )
    if works:
        _bars(axes[0, 0], works, names)
    if curves:
        _lines(axes[0, -1], curves)
    figure.savefig(path, dpi=110)
    plt.close(figure)
    return True


def _has_time(found: dict[str, Any], name: str) -> bool:
    return "seconds" in found["variants"].get(name, {})


def _bars(axis: Any, works: dict[str, Any], names: list[str]) -> None:
    colours = {
        "channels_last": "#b8b8b8",
        "ours": "#1b6ca8",
        "loop": "#8fbfdc",
        "vmap": "#e0a458",
        "twins": "#5aa469",
        "gram": "#8a5a9e",
    }
    place, ticks = 0.0, []
    for found in works.values():
        present = [n for n in names if _has_time(found, n)]
        for i, name in enumerate(present):
            ratio = found["variants"][name]["ratio"]
            axis.barh(place + i, ratio, height=0.85, color=colours[name])
            axis.text(ratio * 1.03, place + i, f"{ratio:.1f}", va="center", fontsize=7)
        ticks.append(place + (len(present) - 1) / 2)
        place += len(present) + 1.2
    axis.axvline(1, color="black", linewidth=1)
    axis.set_xscale("log")
    axis.set_yticks(ticks, [f"{k}, {v['threads']} thr." for k, v in _label(works)])
    axis.invert_yaxis()
    axis.margins(x=0.12)
    axis.set_xlabel("times the plain loop (at 1), same process")
    axis.set_title("Speed of a round")
    from matplotlib.patches import Patch

    axis.legend(handles=[Patch(color=colours[n], label=n) for n in names], fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _label(works: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(key.partition("@")[0], found) for key, found in works.items()]


def _lines(axis: Any, curves: dict[str, Any]) -> None:
    colours = ["#1b6ca8", "#5aa469", "#e0a458", "#8a5a9e"]
    for colour, (size, found) in zip(colours, curves.items(), strict=False):
        relative = [n / found["sizes"][0] for n in found["sizes"]]
        label = f"{size}, from {found['sizes'][0]:,} to {found['sizes'][-1]:,}"
        axis.plot(relative, found["seconds"], "o", color=colour, label=label)
        line = [found["start"] + found["slope"] * n for n in found["sizes"]]
        axis.plot(relative, line, color=colour, linewidth=1)
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.set_xlabel("times the smallest size")
    axis.set_ylabel("seconds per round")
    axis.set_title("Growth (lines: straight lines through the points)")
    axis.legend(fontsize=8)
    axis.spines[["top", "right"]].set_visible(False)
