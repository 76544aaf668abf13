"""Take the models of a run away: one file per group, with what it takes to use them elsewhere."""

import hashlib
import importlib.util
import io
import json
import logging
import math
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from coterie.algorithms.survey.seeded import REFUSAL
from coterie.core.errors import ConfigError
from coterie.core.tree import Tree, named_leaves, tree_map
from coterie.evidence.placing import LEVEL
from coterie.export.bundle import Bundle
from coterie.export.cards import Format, example, model_card, readme
from coterie.export.router import ARRAYS, DISTANCE, SMALLEST, TIES, Drawn, find_router, write_known

if TYPE_CHECKING:
    from coterie.fitted import Fitted

ENDINGS = {"onnx": "onnx", "torch": "pt2", "safetensors": "safetensors"}
ROWS = 32  # samples on which an exported model is compared with ours
CLOSE = 1e-4  # largest difference of outputs, relative to their size
HERE = Path(__file__).parent


def export(fit: "Fitted", to: str | Path, format: Format = "onnx", licence: str = "") -> Path:
    """Write a bundle: a model per group, encoder, router, manifest, model cards and an example.

    Every model is run once more from its file and compared with our own predictions.

    Parameters
    ----------
    to
        Folder to write; it must not exist, or be empty.
    format
        "onnx" and "torch" (`torch.export`) hold whole networks, "safetensors" only weights.
    licence
        Licence of the models, for the manifest and the model cards.
    """
    to = Path(to)
    if format not in get_args(Format):
        raise ConfigError(f"export: format must be onnx, torch or safetensors. Got {format!r}.")
    if isinstance(fit.card.sample_shape, dict):
        raise ConfigError("export: inputs of several parts cannot be exported yet.")
    if to.exists() and (not to.is_dir() or any(to.iterdir())):
        raise ConfigError(f"export: {to} exists and is not empty. Choose another folder.")
    wanted = list_models(fit)
    to.mkdir(parents=True, exist_ok=True)
    x = sample_inputs(fit, ROWS)
    models, differences = [], {}
    for model in wanted:
        folder = to / model["name"]
        folder.mkdir()
        network = Network(fit, model["client"]).eval()
        file = folder / f"model.{ENDINGS[format]}"
        try:
            _write(network, x, file, format)
        except torch._dynamo.exc.UserError as error:
            name = fit.summary["algorithm"]
            raise ConfigError(
                f"export: the prediction must be a network. That of {name} is a computation that "
                "cannot be written to a file. Choose format 'safetensors' for its numbers."
            ) from error
        model["file"] = f"{model['name']}/{file.name}"
        models.append(model)
    encoder = {**fit.encoder.to_dict(), "missing": sorted(fit.encoder.files.missing)}
    _write_json(to / "encoder.json", encoder)
    manifest = describe(fit, models, format, licence)
    router = find_router(fit) if manifest["router"]["models"] and format != "safetensors" else None
    if router is not None:
        networks, known, by_loss = router
        file = to / "router" / f"networks.{ENDINGS[format]}"
        file.parent.mkdir()
        _write(networks, x, file, format)
        write_known(known, file.parent)
        manifest["router"] |= {
            "rule": DISTANCE + (TIES if by_loss else ""),
            "networks": f"router/{file.name}",
            "known": f"router/{ARRAYS}",
            "ties": "smallest loss" if by_loss else "nearest",
        }
    for model in models:
        (to / model["name"] / "README.md").write_text(model_card(manifest, model), "utf-8")
    for name in ("bundle.py", "bundle_router.py"):
        (to / name).write_text((HERE / name).read_text("utf-8"), "utf-8")
    (to / "example.py").write_text(example(manifest), "utf-8")
    (to / "README.md").write_text(readme(manifest), "utf-8")
    _write_manifest(to, manifest)
    if format != "safetensors":
        differences = compare(fit, to, models, x, None if router is None else router[0])
        manifest["checked"] = {"rows": ROWS, "largest_difference": differences}
        _write_manifest(to, manifest)
    return to


def list_models(fit: "Fitted") -> list[dict[str, Any]]:
    """The models to export: one per group, or one per client where every client has its own."""
    fewest = int(fit.summary.get("min_group", 1))
    own = fit.summary.get("personal") or _own_models(fit)
    cards = [card for card in fit.cards if len(card["clients"]) >= fewest]
    if (own and fewest > 1) or not cards:
        raise ConfigError(
            f"export: the run has min_group={fewest}, and no group has so many clients. There is "
            "nothing to export."
        )
    if own:
        groups = {row["client"]: row["group"] for row in fit.rows}
        return [
            {"name": f"client-{i}", "client": name, "group": groups.get(name), "clients": [name]}
            for i, name in enumerate(fit.names)
        ]
    return [
        {
            "name": f"group-{card['group']}",
            "client": card["clients"][0],
            "group": card["group"],
            "clients": card["clients"],
            "odd": bool(card.get("odd")),
            "loss": card["loss"],
            "accuracy": card.get("accuracy"),
            "labels": card.get("labels"),
        }
        for card in cards
    ]


def _own_models(fit: "Fitted") -> bool:
    """Whether clients of one group may have different models."""
    from coterie.core.federation import Each

    ids = torch.arange(len(fit.names))
    return isinstance(fit.algorithm.deploy(fit.state, ids), Each)


class Network(nn.Module):
    """What a client predicts with, as a module: the method's prediction with its own weights."""

    def __init__(self, fit: "Fitted", client: str) -> None:
        super().__init__()
        self.predict = fit.algorithm.predict
        self.tree: Tree = tree_map(torch.clone, fit._personal(client, None))
        for i, (_, leaf) in enumerate(named_leaves(self.tree)):
            self.register_buffer(f"weight_{i}", leaf)

    def forward(self, x: Tensor) -> Tensor:
        """The outputs for some inputs."""
        kept = iter([getattr(self, f"weight_{i}") for i in range(len(list(self.buffers())))])
        output: Tensor = self.predict(tree_map(lambda _: next(kept), self.tree), x)
        return output


def sample_inputs(fit: "Fitted", n: int) -> Tensor:
    """Random inputs of the right shape: tokens, pixels or standardised columns."""
    rng = np.random.default_rng(0)
    shape, dtype = (n, *fit.card.sample_shape), fit.encoder.dtype
    if not fit.encoder.rules and dtype.startswith("int"):
        return torch.from_numpy(rng.integers(0, 2, shape))
    if not fit.encoder.rules and dtype == "uint8":
        return torch.from_numpy(rng.random(shape, dtype=np.float32))
    return torch.from_numpy(rng.normal(size=shape).astype(np.float32))


def sample_rows(fit: "Fitted", n: int) -> dict[str, list[Any]]:
    """Made-up rows that use every rule: numbers, known and unknown categories, missing values."""
    rng = np.random.default_rng(1)
    table: dict[str, list[Any]] = {}
    for rule in fit.encoder.rules:
        if rule.kind == "number":
            values: list[Any] = (rule.shift + rule.scale * rng.normal(size=n)).round(3).tolist()
        elif rule.kind == "boolean":
            values = [("true", "false")[int(v)] for v in rng.integers(0, 2, n)]
        elif rule.kind == "category":
            known = [*rule.categories, "unknown to the models"]
            values = [known[int(v)] for v in rng.integers(0, len(known), n)]
        else:
            values = [f"word{v} word{w} rain" for v, w in rng.integers(0, 50, (n, 2))]
        values[0] = None if rule.kind != "text" else ""
        for name in (rule.name, *rule.with_columns):
            table[name] = values
    return table


def _write(network: Network | Drawn, x: Tensor, file: Path, format: Format) -> None:
    if format == "safetensors":
        weights = {
            "/".join(path): leaf.contiguous().clone() for path, leaf in named_leaves(network.tree)
        }
        save_file(weights, file)
        return
    rows = torch.export.Dim("rows", min=1)
    if format == "torch":
        torch.export.save(torch.export.export(network, (x,), dynamic_shapes=({0: rows},)), file)
        return
    for needed in ("onnx", "onnxscript", "onnxruntime"):
        if importlib.util.find_spec(needed) is None:
            raise ConfigError(
                f"export: {needed} is needed for ONNX and not installed. Install it with: pip "
                "install 'coterie[onnx]'. Or choose format 'torch' or 'safetensors'."
            )
    quiet = io.StringIO()
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with redirect_stdout(quiet), redirect_stderr(quiet):  # the exporter reports its progress
        torch.onnx.export(
            network,
            (x,),
            str(file),
            input_names=["x"],
            output_names=["output"],
            dynamic_shapes=({0: rows},),
            dynamo=True,
            external_data=False,
            verbose=False,
        )


def compare(
    fit: "Fitted", to: Path, models: list[dict[str, Any]], x: Tensor, drawn: Drawn | None
) -> dict[str, float]:
    """Run every exported model from its file; refuse a bundle that predicts something else."""
    bundle: Any = Bundle(to)  # the bundle has a copy of this class
    if fit.encoder.rules:
        rows = sample_rows(fit, ROWS)
        ours = fit.encoder.encode(rows).numpy()
        _refuse("encoder", float(np.abs(bundle.encode(rows) - ours).max()), 1.0)
    found: dict[str, float] = {}
    for model in models:
        wanted = Network(fit, model["client"])(x).detach().numpy()
        for some in (x.numpy(), x.numpy()[:1]):  # any number of rows
            got = bundle.output(some, model["name"])
            apart = float(np.abs(got - wanted[: len(some)]).max())
            found[model["name"]] = max(apart, found.get(model["name"], 0.0))
        _refuse(model["name"], found[model["name"]], float(np.abs(wanted).max()))
    if drawn is not None:
        wanted = drawn(x).detach().numpy()
        got = bundle._run(bundle.manifest["router"]["networks"], x.numpy())
        found["router"] = float(np.abs(got - wanted).max())
        _refuse("router", found["router"], float(np.abs(wanted).max()))
    return found


def _refuse(name: str, apart: float, size: float) -> None:
    if not apart <= CLOSE * max(size, 1.0):
        raise ConfigError(
            f"export: {name} must give the same outputs as before. They differ by {apart:.2g}. "
            "Choose another format."
        )


def describe(
    fit: "Fitted", models: list[dict[str, Any]], format: Format, licence: str
) -> dict[str, Any]:
    """The manifest, without the checksums of files."""
    from coterie import __version__

    supervised = fit.algorithm.supervised and fit.card.task != "reconstruction"
    shared = [one["name"] for one in models if not one.get("odd")]
    score = fit.summary.get("accuracy", {}).get("mean")
    return {
        "format": 1,
        "kind": format,
        "made_with": f"coterie {__version__}",
        "licence": licence,
        "task": fit.card.task if supervised else "component",
        "classes": None if fit.card.classes is None else list(fit.card.classes),
        "label": fit.encoder.label,
        "inputs": _schema(fit),
        "method": fit.description.get("algorithm", {}),
        "network": fit.description.get("model", {}),
        "data": {
            "clients": len(fit.names),
            "fingerprint": fit.description.get("fingerprint", ""),
            "trained_on": json.loads(fit.files["held_out.json"]).get("trained_on", []),
            "notes": fit.notes,
        },
        "metrics": {"accuracy": score, "loss": fit.summary.get("loss"), "split": "test"},
        "recommendation": fit.summary.get("verdict", {}).get("recommendation"),
        "models": models,
        "router": {
            "models": shared if supervised and not fit.summary.get("personal") else [],
            "rule": SMALLEST,
            "networks": None,
            "units": list(fit.description.get("data", {}).get("unit", [])),
            "level": LEVEL,
            "refusal": REFUSAL,
        },
    }


def _schema(fit: "Fitted") -> list[dict[str, Any]]:
    """The columns a row must have, or the shape of a sample."""
    if not fit.encoder.rules:
        return [{"shape": list(fit.card.sample_shape), "dtype": fit.encoder.dtype}]
    return [
        {"column": rule.name, "kind": rule.kind, "features": len(rule.features)}
        for rule in fit.encoder.rules
    ]


def _write_manifest(to: Path, manifest: dict[str, Any]) -> None:
    """Write the manifest with the checksum of every other file."""
    files = sorted(p for p in to.rglob("*") if p.is_file() and p.name != "manifest.json")
    files = [path for path in files if "__pycache__" not in path.parts]
    sums = {
        path.relative_to(to).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }
    _write_json(to / "manifest.json", {**manifest, "files": sums})


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(_plain(content), indent=2, ensure_ascii=False) + "\n", "utf-8")


def _plain(value: Any) -> Any:
    """JSON has no infinity and no nan."""
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
