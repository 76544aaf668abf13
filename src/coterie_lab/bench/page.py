"""The page on speed in the documentation, written from figures."""

from pathlib import Path
from typing import Any

from coterie_lab.bench import goals, report
from coterie_lab.bench.goals import SLACK
from coterie_lab.bench.variants import RELATIVE, WHAT
from coterie_lab.bench.workloads import NAMES

INTRO = """# Speed

<!-- Written by `coterie bench --from FILE --docs THIS`; edit src/coterie/bench/page.py instead. -->

Researchers simulate federations on one machine, and most of the time goes into training many small
models, one after the other. The engine here trains many clients as one computation. This page says
what that is worth: for each workload the time of a round, beside the loop everybody writes and
beside other packages.

{machine}
"""
READING = """## How to read the figures

- **A round** is one call of a method's `step` in a simulated federation: training of all clients,
  averaging, and for clustered methods the losses of all models and the grouping. Data is in memory;
  evaluation is not part of it. The engine draws its batches within the round, the plain loop gets
  them ready made.
- **Ratio** is the time of the plain loop over the time of the variant, both from the same process:
  *x4* means four times as fast. Absolute times differ by a half between days; ratios by less, so
  only ratios are compared, and differences below 15 % mean nothing.
- **The plain loop**: for each client copy the model in, make an optimiser of `torch.optim`, then
  `zero_grad`, `backward`, `step` for every batch, and add the result to the mean.
- **Of peak** is the share of what the machine reaches in a product of two 2048 x 2048 matrices,
  measured in the same process with the same threads. Operations are those of the plain way:
  forward, gradient of weights, gradient of inputs except in the first layer. The Gram form needs
  fewer, so its share may exceed 100 %.
- **Spread** is the slowest less the fastest sample, over the median. **Others** is the largest
  share of the processors that other processes used during a sample that counts; samples above
  {limit} are repeated a few times, and a figure that stayed above is marked *disturbed*.
- **Apart** is the largest difference of any weight from the plain loop after one round. Every
  variant is compared before it is timed, and is not timed if it is further off than its tolerance
  or by more than {relative} of what the round changed.
- **Memory** is the peak of a process of its own that runs two rounds, libraries included.

Variants: {variants}.

Before timing, each variant is called once; then all take turns, and the median of {repeats}
samples counts.
"""
AGAIN = """## Measure it yourself

```bash
coterie bench --only W1,W9                  # two workloads, a few minutes
coterie bench --peers --growth --json results/bench.json
coterie bench --from results/bench.json --docs performance.md
coterie bench --explain cnn                 # what is stacked in a network, and what is not
```

The machine should be idle. The file has, per workload and variant, `seconds`, `ratio` (to the plain
loop) and `peak_fraction`, and whatever the tables on this page show.
"""


WHY = """### Why some goals are missed

The goals were set on another processor, from prototypes that did one thing each. On the machine of
this page:

- **W1, W7, W9 and Adam, with one thread.** The plain loop is the faster part of the ratio: it
  reaches a quarter of the peak here, where the goals expect less. What is left of a stacked step is
  memory traffic (a step of W1 reads and writes every client's 159,010 weights for 20 samples; Adam
  moves five such arrays) and the Python between them.
- **Gram form.** Its arithmetic is done, but products of 200 x 200 run further below the peak than
  the large ones the goal assumes.
- **W3 special.** It stands for Winograd convolutions, which are not built: they would double the
  code of the layer and round differently (6e-5 after ten steps).
- **W8.** Updates are summed in double precision, so that the order of clients does not matter to
  more than rounding; in single precision, in place, it takes two thirds of the time.
- **Memory.** Libraries alone take 390 MB; the rest is one stack of clients with its activations and
  the data. Smaller stacks would fit and be slower.
- **Flower, pfl.** Their rounds, too, are faster here than where the goals were set; on W3 both
  sides spend their time in the same convolutions.
"""


def write(results: dict[str, Any], path: Path) -> None:
    """Write the page, with its picture beside it."""
    picture = path.with_suffix(".png")
    drawn = report.picture(results, picture)
    path.write_text(page(results, picture.name if drawn else None))


def page(results: dict[str, Any], picture: str | None = None) -> str:
    """The page as Markdown."""
    machine, settings = results["machine"], results["settings"]
    text = (
        f"Measured on {machine['processor']} with {machine['cores']} cores and "
        f"{machine['memory_gb']:.0f} GB, torch {machine['torch']}. Images: {results['data']}. "
        "Workloads may come from several calls (`--more`); the variants of one never do."
    )
    if settings["scale"] != 1:
        text += f"\n\n**A trial with {settings['scale']:g} of the clients: no figure counts.**"
    parts = [INTRO.format(machine=text), "## In short\n", short(results)]
    missing = [name for name in NAMES if name not in results["workloads"]]
    if missing:
        parts.append(f"Not measured in this run: {', '.join(missing)}.")
    if picture is not None:
        parts.append(f"![Ratio to the plain loop by workload and variant]({picture})")
    parts.append(
        READING.format(
            limit=f"{100 * results['foreign_limit']:.0f} %",
            relative=f"{100 * RELATIVE:.0f} %",
            repeats=settings["repeats"],
            variants="; ".join(f"`{name}`: {what}" for name, what in WHAT.items()),
        )
    )
    parts.append("## Workloads\n")
    parts += [report.block(key, found) for key, found in results["workloads"].items()]
    if results["extras"]:
        parts.append("## Many clients, and the server\n")
        parts += [report.extra(name, found) for name, found in results["extras"].items()]
    if results.get("growth"):
        parts += [
            "## Growth\n",
            "Time of a round as one size grows and all else stays. A straight line is laid through "
            "the points; its start is the fixed cost of a round.",
            report.growth(results["growth"]),
        ]
    if results.get("peers"):
        parts += [
            "## Other packages\n",
            "The same network, start, data and batches, FedAvg, on two processors. Each package "
            "runs in an environment of its own; its first round is checked against the plain loop "
            "and reported apart, because workers start in it. These figures cross processes: "
            "read them as within a half.",
            report.peers(results["peers"]),
        ]
    if results.get("goals"):
        parts += [
            "## Goals\n",
            f"*Nearly*: at least {100 * SLACK:.0f} % of the goal; ratios within one run move by as "
            "much. The floor (never slower than 0.95 of the plain loop), memory and straight "
            "lines know only yes and no.",
            report.goals(goals.of_results(results)),
            WHY,
        ]
    return "\n\n".join([*parts, AGAIN])


def short(results: dict[str, Any]) -> str:
    """One line per workload: the plain loop, our engine, the best variant."""
    lines = []
    for key, found in results["workloads"].items():
        timed = {n: v for n, v in found.get("variants", {}).items() if "seconds" in v}
        if "ours" not in timed or "plain" not in timed:
            lines.append([key, found.get("title", ""), "", "", "", "", ""])
            continue
        plain, ours = timed["plain"], timed["ours"]
        best = max((n for n in timed if n != "plain"), key=lambda n: timed[n]["ratio"])
        name = key.partition("@")[0]
        others = [
            other["variants"]["plain"].get("seconds", plain["seconds"])
            for again, other in results["workloads"].items()
            if again.partition("@")[0] == name and "variants" in other
        ]
        fastest = min(others)
        lines.append(
            [
                f"{name}, {_threads(found['threads'])}",
                found["title"],
                report.seconds(plain["seconds"]),
                report.seconds(ours["seconds"]),
                f"x{ours['ratio']:.1f}",
                f"x{fastest / ours['seconds']:.1f}",
                f"x{timed[best]['ratio']:.1f} (`{best}`)",
            ]
        )
    names = ["workload", "what", "plain loop", "this engine", "ratio", "to fastest", "best variant"]
    note = (
        "*To fastest*: beside the plain loop with whichever number of threads it is fastest with, "
        "since a second thread may cost a loop of small steps more than it gives (from another "
        "process, so less sure)."
    )
    return f"{report.table(names, lines)}\n\n{note}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
