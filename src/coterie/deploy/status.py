"""The status of a deployment: what can be checked from outside while it runs."""

import contextlib
import json
import time
from typing import Any

from coterie.deploy.local import SUPERLINK, Deployment
from coterie.deploy.processes import alive
from coterie.deploy.server import locked
from coterie.engines.relay import live_file
from coterie.running.folder import RunFolder, read_json


def read_status(local: Deployment) -> dict[str, Any]:
    """The processes, the nodes, the round, and whose answers are missing."""
    events, processes = local.events(), []
    for entry in local.book.read():
        up = alive(entry)
        restarts = [e for e in events if e["role"] == entry["role"] and e["kind"] == "ended"]
        about = {**entry, "alive": up, "restarts": len(restarts)}
        if restarts:
            about["last_end"] = restarts[-1]["text"]
        if entry["role"] == SUPERLINK:
            about["answers"] = up and local.answers()
        if "clients" in entry:
            about["seen"] = {name: _seen(local, name) for name in entry["clients"]}
        processes.append(about)
    rounds = read_json(local.folder / "app" / "run.json").get("run", {}).get("rounds")
    return {
        "processes": processes,
        "nodes": _registered(local, processes),
        "rounds": len(RunFolder(local.out).lines()),
        "of": rounds,
        "finished": (local.out / "summary.json").exists(),
        "running": locked(local.out),
        "waiting": _waiting(local) if locked(local.out) else [],
    }


def _seen(local: Deployment, name: str) -> dict[str, Any] | None:
    """When a client on this machine last reached the SuperLink, and what it does."""
    path = local.node_home(name) / "seen.json"
    with contextlib.suppress(OSError, ValueError):
        about = json.loads(path.read_text())
        return {**about, "seconds_ago": _ago(about["seen"])}
    return None


def _registered(local: Deployment, processes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All nodes that may connect, as the SuperLink sees them."""
    if not any(p.get("answers") for p in processes) or local.address["insecure"]:
        return []
    from coterie.engines.flower_private import Control

    return Control(local.address["superlink"], local.certificate, local.token).nodes()


def _waiting(local: Deployment) -> list[dict[str, Any]]:
    """Clients whose answers are missing, and for how long."""
    with contextlib.suppress(OSError, ValueError):
        entries = json.loads(live_file(local.out).read_text())
        return [{**e, "seconds": _ago(e["since"])} for e in entries]
    return []


def describe_status(found: dict[str, Any]) -> list[str]:
    """The status of a deployment, as lines for a person."""
    lines = []
    for entry in found["processes"]:
        parts = [f"{entry['role']:20} {'up' if entry['alive'] else 'DOWN':5} {entry['pid']:<8}"]
        if "answers" in entry:
            answers = "answers" if entry["answers"] else "DOES NOT ANSWER"
            parts.append(f"{entry['listens']}, {answers}")
        for name, seen in entry.get("seen", {}).items():
            who = f"{name} " if len(entry["seen"]) > 1 else ""
            if seen is None:
                parts.append(f"{who}not seen yet")
                continue
            doing = f", {seen['doing']}" if seen["doing"] else ""
            parts.append(f"{who}seen {seen['seconds_ago']:g} s ago{doing}")
        if entry["restarts"]:
            times = "once" if entry["restarts"] == 1 else f"{entry['restarts']} times"
            parts.append(f"ended {times}, last: {entry['last_end']}")
        lines.append("  ".join(parts))
    here = {name for entry in found["processes"] for name in entry.get("clients", ())}
    for node in found["nodes"]:
        if node["name"] not in here:
            beat = "never" if node["heartbeat"] is None else f"{node['heartbeat']:g} s ago"
            lines.append(f"{'remote ' + node['name']:20} {node['status']:8} last heartbeat {beat}")
    done = f"{found['rounds']} of {found['of'] or '?'} rounds done"
    if found["finished"]:
        lines.append(f"{done}, finished")
    elif not found["running"]:
        lines.append(f"{done}, no run is active")
    else:
        late = [f"{w['client']} ({w['seconds']:g} s)" for w in found["waiting"]]
        lines.append(f"{done}, " + (f"waiting for {', '.join(late)}" if late else "running"))
    return lines


def _ago(moment: float) -> float:
    """Seconds since a moment."""
    return max(0.0, round(time.time() - moment, 1))
