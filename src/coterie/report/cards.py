"""A finished run in text: what was found, a card per group, a row per client."""

import json
from typing import Any

from coterie.report.table import Table
from coterie.report.words import found
from coterie.running.folder import RunFolder
from coterie.running.progress import megabytes

FORMATS = {"margin": ".2f", "accuracy": ".1%", "error": ".4g", "loss": ".4f"}
GAINS = {"gain over alone": "+.3f", "gain over one model": "+.3f"}


def shown(folder: RunFolder) -> str:
    """The whole report."""
    files, summary = folder.final_files(), folder.summary()
    cards = json.loads(files["groups.json"])["groups"]
    rows = json.loads(files["clients.json"])["clients"]
    parts = [f"{folder.path}: {found(summary, cards, rows)}", _facts(summary)]
    parts += [group_card(card) for card in cards]
    columns = list(rows[0])
    parts.append(str(Table(columns, [list(row.values()) for row in rows], FORMATS | GAINS)))
    return "\n\n".join(parts)


def _facts(summary: dict[str, Any]) -> str:
    facts = [f"{summary['rounds']} rounds", f"{megabytes(summary['bytes'])} moved"]
    if summary.get("ari") is not None:
        facts.append(f"agreement with the true groups (ARI) {summary['ari']:.2f}")
    if summary["abandoned_rounds"]:
        facts.append(f"{summary['abandoned_rounds']} rounds abandoned")
    return ", ".join(facts) + "."


def group_card(card: dict[str, Any]) -> str:
    """One group: size, score, labels, losses on all models, the nearest other group."""
    clients = card["clients"]
    names = ", ".join(clients[:6]) + (
        f", ... ({len(clients) - 6} more)" if len(clients) > 6 else ""
    )
    lines = [f"Group {card['group']}: {len(clients)} clients: {names}"]
    score = [f"loss {card['loss']:.4f}"] if card["loss"] is not None else []
    if card.get("accuracy") is not None:
        score.insert(0, f"{card['accuracy']:.1%} right")
    lines.append("  on its own test data: " + ", ".join(score))
    if "labels" in card:
        shares = sorted(card["labels"].items(), key=lambda pair: -pair[1])[:6]
        lines.append("  labels: " + ", ".join(f"{name} {share:.0%}" for name, share in shares))
    if "loss_profile" in card:
        losses = [f"{j}: {loss:.2f}" for j, loss in enumerate(card["loss_profile"])]
        lines.append("  its clients' loss on each model: " + ", ".join(losses))
    if card["margin"] is not None:
        near = f", nearest other group {card['nearest']}" if "nearest" in card else ""
        lines.append(f"  margin {card['margin']:.2f} (1: beyond doubt){near}")
    return "\n".join(lines)
