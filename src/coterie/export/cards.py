"""The words of a bundle: a card for each model, a page on the whole, and an example."""

from typing import Any, Literal

Format = Literal["onnx", "torch", "safetensors"]


def model_card(manifest: dict[str, Any], model: dict[str, Any]) -> str:
    """What somebody must know before using a model."""
    clients = model["clients"]
    shown = ", ".join(map(_text, clients[:20])) + (
        f" and {len(clients) - 20} more" if len(clients) > 20 else ""
    )
    lines = [
        f"# Model {model['name']}",
        "",
        f"- **Made with:** {manifest['made_with']}, method {manifest['method'].get('name', '?')}, "
        f"network {manifest['network'].get('name', '?')}",
        f"- **Licence:** {_text(manifest['licence']) or 'not stated'}",
        f"- **Trained for:** {len(clients)} of {manifest['data']['clients']} clients: {shown}",
        f"- **Task:** {manifest['task']}"
        + (f", column {_text(manifest['label'])}" if manifest["label"] else ""),
    ]
    if manifest["classes"]:
        lines.append(f"- **Classes:** {', '.join(map(_text, manifest['classes'][:30]))}")
    if model.get("accuracy") is not None:
        lines.append(f"- **Accuracy** on the clients' own test rows: {model['accuracy']:.1%}")
    if model.get("loss") is not None:
        lines.append(f"- **Loss** on the clients' own test rows: {model['loss']:.4f}")
    if model.get("labels"):
        top = sorted(model["labels"].items(), key=lambda pair: -pair[1])[:10]
        said = ", ".join(f"{_text(name)} {share:.0%}" for name, share in top)
        lines.append(f"- **Labels** in the training rows: {said}")
    if model.get("odd"):
        lines.append("- This client is unlike all others; the model is of no use to others.")
    lines += [
        "",
        "## Limits",
        "",
        "The model was trained for the clients above. For a new client, find its group first "
        "(`place` in bundle.py) and test the model on its rows. A model can reveal something about "
        "the rows that it was trained on.",
        "",
    ]
    return "\n".join(lines)


def readme(manifest: dict[str, Any]) -> str:
    """What is in the bundle, and how to use it."""
    rows = "rows.npy" if "shape" in manifest["inputs"][0] else "rows.csv"
    needed = {"onnx": "numpy onnxruntime", "torch": "numpy torch"}.get(manifest["kind"])
    use = (
        f"    pip install {needed}\n    python example.py {rows}\n"
        if needed
        else "The files hold weights only. Build the network of manifest.json, and load them.\n"
    )
    models = "\n".join(
        f"- `{one['file']}`: {len(one['clients'])} clients" for one in manifest["models"]
    )
    router = ""
    if manifest["router"]["models"]:
        router = f"- a new client is placed by the {manifest['router']['rule']}\n"
    return f"""# Exported models

{use}
{models}
- `manifest.json`: checksums, columns, classes, metrics, method, data, licence
- `encoder.json`: how rows become inputs
- `bundle.py`: encodes rows, runs the models, finds the group of a new client; no Coterie needed
{router}- `example.py`: how to use it
"""


def example(manifest: dict[str, Any]) -> str:
    """Ten lines that use the bundle."""
    if manifest["kind"] == "safetensors":
        first = manifest["models"][0]["file"]
        return f"""# The weights of a model, by name.
from safetensors.numpy import load_file

for name, weight in load_file("{first}").items():
    print(name, weight.shape)
"""
    first = manifest["models"][0]["name"]
    reads = "rows = sys.argv[1]  # a CSV file with the columns of manifest.json"
    if "shape" in manifest["inputs"][0]:
        reads = "rows = np.load(sys.argv[1])  # an array of samples"
    if manifest["router"]["models"] and "shape" not in manifest["inputs"][0]:
        which = "found = models.place(rows)  # needs the label column"
        which += '\nmodel, fits = found["model"], found["fits"]'
        model = '(model if fits is not False else f"fits no group; the nearest is {model}")'
    else:
        which, model = f'model = "{first}"', "(model)"
    probabilities = (
        "\nprint(models.probabilities(rows, model).round(3))"
        if manifest["task"] == "classification"
        else ""
    )
    imports = "import sys\n\nimport numpy as np\n" if "np.load" in reads else "import sys\n"
    return f"""{imports}
from bundle import Bundle

{reads}
models = Bundle(".")
{which}
print{model}
print(models.predict(rows, model)){probabilities}
"""


def _text(value: Any) -> str:
    """A name as plain text in Markdown."""
    safe = "".join(letter if letter.isprintable() else " " for letter in str(value))
    return "".join(f"\\{letter}" if letter in "\\`*_{}[]<>#|!&" else letter for letter in safe)
