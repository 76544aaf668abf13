"""A finished run in text: what was found, a card per group, a row per client."""

from pathlib import Path
from typing import Any

from coterie.core.errors import ConfigError
from coterie.report import evidence
from coterie.report.table import Table
from coterie.report.verdict import Verdict
from coterie.report.words import describe_result
from coterie.running.files import blame
from coterie.running.folder import RunFolder, read_rows
from coterie.running.progress import megabytes

FORMATS = {"margin": ".2f", "accuracy": ".1%", "error": ".4g", "loss": ".4f"}
GAINS = {"gain over alone": "+z.3f", "gain over one model": "+z.3f"}


def show_run(folder: RunFolder) -> str:
    """The whole report."""
    files, summary = folder.final_files(), folder.summary()
    with blame(folder.path):
        return _report(folder.path, files, summary)


def _report(path: Path, files: dict[str, bytes], summary: dict[str, Any]) -> str:
    cards, rows = read_rows(files, "groups"), read_rows(files, "clients")
    parts = [f"{path}: {describe_result(summary, cards, rows)}", _facts(summary)]
    if "verdict.json" in files:
        parts.append(Verdict.of(files["verdict.json"]).reasons)
    if "mixture" in summary:
        parts.append(mixture_card(summary["mixture"]))
    if "evidence" in summary:
        curves = summary["evidence"]
        parts += [evidence.words(curves), str(evidence.table(curves))]
    parts += [group_card(card) for card in cards]
    rows = [_with_shares(row) for row in rows]
    columns = list(rows[0])
    parts.append(str(Table(columns, [list(row.values()) for row in rows], FORMATS | GAINS)))
    return "\n\n".join(parts)


def mixture_card(mixture: dict[str, Any]) -> str:
    """Components inside clients: why this number, and how far the shares are from the truth."""
    lines = []
    if "eigenvalues" in mixture:
        k = mixture["n_components"]
        found = ", ".join(f"{value:.3g}" for value in mixture["eigenvalues"][: k + 1])
        chance = mixture["thresholds"][0] if mixture["thresholds"] else 0.0
        lines.append(
            f"Components: {k}. Clients differ in directions of strength {found}; chance alone "
            f"reaches {chance:.3g}."
        )
    elif "n_components" in mixture:
        lines.append(f"Components: {mixture['n_components']}.")
    apart = mixture.get("tail_against_anchor")
    if apart is not None:
        sure = "they agree" if apart <= 0.05 else "the true shares lie between them, so quote both"
        lines.append(
            f"  two estimates of the shares (score tails, purest clients) differ by {apart:.3f}: "
            f"{sure}"
        )
    if mixture.get("mae") is not None:
        slope = "" if mixture.get("slope") is None else f", slope {mixture['slope']:.2f}"
        lines.append(f"  mean error of shares against the truth {mixture['mae']:.3f}{slope}")
    if mixture.get("matched"):
        own = ", ".join(f"{value:.1%}" for value in mixture["matched"])
        lines.append(f"  accuracy of each expert on its own component: {own}")
    return "\n".join(lines)


def draw(folder: RunFolder, out: str | Path) -> Path:
    """The clients' shares of components if there are any, else why there are this many groups."""
    row = read_rows(folder.final_files(), "clients")[0]
    if any(name.startswith("share ") for name in row):
        return draw_shares(folder, out)
    return evidence.picture(folder.summary().get("evidence", []), out)


def draw_shares(folder: RunFolder, out: str | Path) -> Path:
    """Draw the clients' shares of components as bars; for methods that estimate them."""
    from coterie.report.mixture_pictures import proportions_picture

    rows = read_rows(folder.final_files(), "clients")
    k = sum(name.startswith("share ") for name in rows[0])
    if not k:
        raise ConfigError(
            f"Picture: the run must estimate shares of components. {folder.path} has none. Run "
            "fedgmi, blend or fedsoft."
        )
    shares = [[row[f"share {j}"] or 0.0 for j in range(k)] for row in rows]
    errors = [[row[f"error {j}"] or 0.0 for j in range(k)] for row in rows]
    return proportions_picture([row["client"] for row in rows], shares, errors, out)


def _with_shares(row: dict[str, Any]) -> dict[str, Any]:
    """A client's row with each share and its standard error in one column."""
    out = {name: value for name, value in row.items() if not _is_error(name, row)}
    for name, value in out.items():
        error = row.get(name.replace("share", "error")) if name.startswith("share ") else None
        if name.startswith("share ") and value is not None:
            out[name] = f"{value:.2f}" + ("" if error is None else f" ± {error:.2f}")
    return out


def _is_error(name: str, row: dict[str, Any]) -> bool:
    return name.startswith("error ") and name.replace("error", "share") in row


def _facts(summary: dict[str, Any]) -> str:
    facts = [f"{summary['rounds']} rounds", f"{megabytes(summary['bytes'])} sent"]
    if summary.get("ari") is not None:
        facts.append(f"agreement with the true groups (ARI) {summary['ari']:.2f}")
    if summary["abandoned_rounds"]:
        facts.append(f"abandoned rounds: {summary['abandoned_rounds']}")
    return ", ".join(facts) + "."


def group_card(card: dict[str, Any]) -> str:
    """One group: its clients, scores, labels, losses on all models, and the nearest other group."""
    clients = card["clients"]
    names = ", ".join(clients[:6]) + (
        f", ... ({len(clients) - 6} more)" if len(clients) > 6 else ""
    )
    lines = [f"Group {card['group']}: {len(clients)} client{'s' * (len(clients) != 1)}: {names}"]
    score = [f"loss {card['loss']:.4f}"] if card["loss"] is not None else []
    if card.get("accuracy") is not None:
        score.insert(0, f"accuracy {card['accuracy']:.1%}")
    lines.append("  on its clients' test data: " + ", ".join(score))
    if "labels" in card:
        shares = sorted(card["labels"].items(), key=lambda pair: -pair[1])[:6]
        lines.append("  labels: " + ", ".join(f"{name} {share:.0%}" for name, share in shares))
    if "loss_profile" in card:
        losses = [f"{j}: {loss:.2f}" for j, loss in enumerate(card["loss_profile"])]
        lines.append("  mean loss on each model: " + ", ".join(losses))
    if card["margin"] is not None:
        near = f", nearest other group {card['nearest']}" if "nearest" in card else ""
        lines.append(f"  margin {card['margin']:.2f} (0: between groups, 1: clear){near}")
    return "\n".join(lines)
