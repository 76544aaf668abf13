"""Write the page on performance of the documentation from measured figures."""

from pathlib import Path
from typing import Any

from coterie_lab.bench import goals, report
from coterie_lab.bench.goals import SLACK
from coterie_lab.bench.variants import RELATIVE, WHAT
from coterie_lab.bench.workloads import NAMES

INTRO = """# Performance

<!-- Written by `coterie bench --from FILE --docs THIS`; edit src/coterie_lab/bench/page.py. -->

This page shows how fast simulations run. A simulation trains many small models, usually one after
the other. Coterie's engine trains many clients in one computation. For each workload, the tables
compare the time of a round with a plain loop over the clients and with other packages.

{machine}
"""
READING = """## How to read the tables

- **Round**: one call of `step` of a method in a simulated federation. It includes the training of
  all clients, averaging, and for clustered methods the losses of all models and the clustering. The
  data are in memory, and evaluation is not included. The time of the engine includes drawing the
  batches; the plain loop receives them ready made.
- **Plain loop**: for each client, copy the model, create an optimiser of `torch.optim`, call
  `zero_grad`, `backward` and `step` for every batch, and add the result to the mean.
- **Speed-up**: the time of the plain loop divided by the time of the variant, both in the same
  process; *x4* means four times as fast. Absolute times vary by up to a half between days.
  Speed-ups vary less, so compare only these, and ignore differences below 15 %.
- **Share of peak**: the speed relative to a product of two 2048 x 2048 matrices, measured in the
  same process with the same threads. The operations are those of the plain loop: forward pass,
  gradient of the weights, and gradient of the inputs except in the first layer. The Gram form needs
  fewer operations, so its share can exceed 100 %.
- **Spread**: the slowest sample minus the fastest, divided by the median.
- **Other load**: the largest share of the processors that other processes used during a sample.
  Samples above {limit} are repeated a few times; a figure that stays above is marked *disturbed*.
- **Difference**: the largest difference of any weight from the plain loop after one round. Every
  variant is checked before it is timed. It is not timed if it differs by more than its tolerance,
  or by more than {relative} of what the round changed.
- **Memory**: the peak memory of a separate process that runs two rounds, libraries included.

The variants are:

{variants}

Each variant is called once before it is timed. Then all variants are timed in turn. The tables show
the median of {repeats} samples.
"""
AGAIN = """## Measure it yourself

```bash
coterie bench --only W1,W9                  # two workloads, a few minutes
coterie bench --peers --growth --json results/bench.json
coterie bench --from results/bench.json --docs performance.md
coterie bench --explain cnn                 # which layers of a network are stacked
```

The machine should be idle. For each workload and variant, the file has `seconds`, `ratio` (the
speed-up over the plain loop), `peak_fraction`, and all other figures on this page.
"""


WHY = """### Why some goals are not met

The goals were set on another processor, with prototypes of single parts. On the machine of this
page:

- **W1, W7, W9 and Adam, with one thread.** The plain loop is faster than the goals assume: it
  reaches a quarter of the peak. The remaining time of a stacked step is memory traffic and Python.
  One step of W1 reads and writes the 159,010 weights of every client for 20 samples; Adam moves
  five such arrays.
- **Gram form.** It is implemented, but products of 200 x 200 matrices reach a smaller share of the
  peak than the large products that the goal assumes.
- **W3 special.** The goal assumes Winograd convolutions, which are not implemented. They would
  double the code of the layer and round differently (6e-5 after ten steps).
- **W8.** Updates are summed in double precision, so that the order of the clients changes the
  result by rounding only. Summing in place in single precision takes two thirds of the time.
- **Memory.** The libraries alone take 390 MB. The rest is the data and one stack of clients with
  its activations. Smaller stacks would need less memory but would be slower.
- **Flower, pfl.** Their rounds are also faster here than on the machine of the goals. On W3, both
  sides spend their time in the same convolutions.
"""


def write(results: dict[str, Any], path: Path) -> None:
    """Write the page and its picture."""
    picture = path.with_suffix(".png")
    drawn = report.picture(results, picture)
    path.write_text(page(results, picture.name if drawn else None))


def page(results: dict[str, Any], picture: str | None = None) -> str:
    """The page as Markdown."""
    machine, settings = results["machine"], results["settings"]
    text = (
        f"Machine: {machine['processor']} with {machine['cores']} cores and "
        f"{machine['memory_gb']:.0f} GB, torch {machine['torch']}. Images: {results['data']}. "
        "The workloads may have been measured in several calls (`--more`), but all variants of a "
        "workload were measured in the same call."
    )
    if settings["scale"] != 1:
        share = f"{settings['scale']:g}"
        text += f"\n\n**A trial with {share} of the clients; the figures are not comparable.**"
    parts = [INTRO.format(machine=text), "## Summary\n", short(results)]
    missing = [name for name in NAMES if name not in results["workloads"]]
    if missing:
        parts.append(f"Not measured in this run: {', '.join(missing)}.")
    if picture is not None:
        parts.append(f"![Speed-up over the plain loop by workload and variant]({picture})")
    parts.append(
        READING.format(
            limit=f"{100 * results['foreign_limit']:.0f} %",
            relative=f"{100 * RELATIVE:.0f} %",
            repeats=settings["repeats"],
            variants=report.table(["variant", "meaning"], [[f"`{n}`", w] for n, w in WHAT.items()]),
        )
    )
    parts.append("## Workloads\n")
    parts += [report.block(key, found) for key, found in results["workloads"].items()]
    if results["extras"]:
        parts.append("## Many clients and the server\n")
        parts += [report.extra(name, found) for name, found in results["extras"].items()]
    if results.get("growth"):
        parts += [
            "## Growth\n",
            "The time of a round when one size grows and all others stay the same. A straight line "
            "is fitted to the times; its intercept is the fixed cost of a round.",
            report.growth(results["growth"]),
        ]
    if results.get("peers"):
        parts += [
            "## Other packages\n",
            "FedAvg with the same network, initial model, data and batches, on two processors. "
            "Each package runs in its own environment. Its first round is compared with the plain "
            "loop and listed separately, because it includes the start of the workers. These "
            "figures come from different processes and may be off by up to a half.",
            report.peers(results["peers"]),
        ]
    if results.get("goals"):
        parts += [
            "## Goals\n",
            f"*Nearly* means at least {100 * SLACK:.0f} % of the goal, because speed-ups vary by "
            "as much within one run. It does not apply to the floor (at least 0.95 of the speed of "
            "the plain loop), to memory and to linear growth.",
            report.goals(goals.of_results(results)),
            WHY,
        ]
    return "\n\n".join([*parts, AGAIN])


def short(results: dict[str, Any]) -> str:
    """One line per workload: the plain loop, our engine and the best variant."""
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
    names = ["workload", "content", "plain loop", "our engine", "speed-up"]
    names += ["over fastest loop", "best variant"]
    note = (
        "*Over fastest loop*: the speed-up over the plain loop with the number of threads at which "
        "the loop is fastest. A second thread can slow down a loop of small steps. This figure "
        "compares two processes, so it is less certain."
    )
    return f"{report.table(names, lines)}\n\n{note}"


def _threads(count: int) -> str:
    return "1 thread" if count == 1 else f"{count} threads"
