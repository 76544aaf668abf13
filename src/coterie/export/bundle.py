"""Use exported models without Coterie: numpy, and onnxruntime or torch for the networks.

    from bundle import Bundle
    models = Bundle(".")
    found = models.place("rows.csv")
    print(models.predict("rows.csv", found["group"]))

This file is part of every bundle. manifest.json and encoder.json say what it needs to know.
"""

import base64
import csv
import hashlib
import json
import re
from pathlib import Path

import numpy as np

if __package__:
    from coterie.export.bundle_router import find_group
else:  # in a bundle
    from bundle_router import find_group  # type: ignore[import-not-found,no-redef]

WORD_BUCKETS, CATEGORY_BUCKETS = 2**16, 32


class Bundle:
    """The models of a federation.

    Parameters
    ----------
    folder
        The folder with manifest.json.
    check
        Compare the checksum of every file with the manifest first.
    """

    def __init__(self, folder=".", check=True):
        self.folder = Path(folder)
        self.manifest = json.loads((self.folder / "manifest.json").read_text(encoding="utf-8"))
        self.rules = json.loads((self.folder / "encoder.json").read_text(encoding="utf-8"))
        self.models = {model["name"]: model for model in self.manifest["models"]}
        self._networks = {}
        for name, wanted in self.manifest["files"].items() if check else ():
            found = hashlib.sha256((self.folder / name).read_bytes()).hexdigest()
            if found != wanted:
                raise ValueError(f"{name} is damaged: its checksum is not that of the manifest.")

    def predict(self, rows, model):
        """Labels, or numbers in their own unit, by a model: its name, or the number of a group."""
        output = self.output(self.encode(rows), model)
        task, classes = self.manifest["task"], self.manifest["classes"]
        if task == "classification":
            best = output.argmax(1)
            return best if classes is None else np.array(classes)[best]
        if task == "component":
            return output.argmax(1)
        mean, scale = self.rules["target_mean"], self.rules["target_scale"]
        output = output * np.array(scale) + np.array(mean) if mean else output
        return output[:, 0] if output.ndim == 2 and output.shape[1] == 1 else output

    def probabilities(self, rows, model):
        """The probability of each class, in the order of `manifest["classes"]`."""
        output = self.output(self.encode(rows), model)
        weight = np.exp(output - output.max(1, keepdims=True))
        return weight / weight.sum(1, keepdims=True)

    def place(self, rows, labels=None):
        """The group of a new client, whether it fits there, and the losses of the groups' models.

        `manifest["router"]` says by which rule. "fits" is None if the rule refuses nobody.

        Parameters
        ----------
        labels
            The labels; None: they are in the label column of the rows.
        """
        router = self.manifest["router"]
        x = self.encode(rows)
        y = self._targets(rows if labels is None else {self.rules["label"] or "y": labels})
        losses = {
            name: float(self._losses(self.output(x, name)[:, None], y).mean())
            for name in router["models"]
        }
        order = sorted(losses, key=lambda name: losses[name])
        best, second = losses[order[0]], losses[order[1]] if len(order) > 1 else np.inf
        margin = 1.0 if second == np.inf else (second - best) / max(second + best, 1e-300)
        found = {"group": self.models[order[0]]["group"], "fits": None, "margin": margin}
        if router["networks"]:
            found = self._compare(x, y, rows, losses)
        group = found["group"]
        model = next((name for name in order if self.models[name]["group"] == group), None)
        return {"model": model, **found, "losses": losses}

    def _compare(self, x, y, rows, losses):
        """Place a client by networks that were never trained."""
        router = self.manifest["router"]
        with np.load(self.folder / router["known"], allow_pickle=False) as file:
            kept = {name: file[name] for name in file.files}
        units = None
        if router["units"] and self.rules["rules"]:
            table = self._table(rows)
            if all(name in table for name in router["units"]):
                columns = [[str(value) for value in table[name]] for name in router["units"]]
                units = np.array(["\0".join(row) for row in zip(*columns, strict=True)])
        label = y if self.manifest["task"] == "classification" else np.zeros(len(x), dtype=int)
        answers = self._losses(self._run(router["networks"], x), y)
        found = find_group(answers, label, kept, units, router["level"], router["refusal"])
        fitting = [one for one, p in found["p"].items() if p > router["level"]]
        if router["ties"] == "smallest loss" and len(fitting) > 1:
            own = {self.models[name]["group"]: loss for name, loss in losses.items()}
            first, second, *_ = sorted(fitting, key=lambda one: own.get(one, np.inf))
            apart = (own[second] - own[first]) / max(own[second] + own[first], 1e-300)
            found |= {"group": first, "fits": first >= 0, "margin": apart}
        return found

    def _losses(self, output, y):
        """The loss of each row on each network: [n, networks], from [n, networks, outputs]."""
        if self.manifest["task"] == "classification":
            top = output.max(2, keepdims=True)
            total = top[..., 0] + np.log(np.exp(output - top).sum(2))
            return (total - output[np.arange(len(y)), :, y]).astype(float)
        return ((output - y.reshape(len(y), 1, -1)) ** 2).mean(2).astype(float)

    def output(self, x, model):
        """The raw output of a network for encoded inputs."""
        name = model if model in self.models else f"group-{model}"
        if name not in self.models:
            raise ValueError(f"There is no model {model!r}. There are: {', '.join(self.models)}.")
        return self._run(self.models[name]["file"], x)

    def _run(self, file, x):
        if file not in self._networks:
            self._networks[file] = _load(self.folder / file)
        return self._networks[file](x)

    # inputs

    def encode(self, rows):
        """Inputs of the networks: from a CSV file, a dict of columns, a data frame or an array."""
        if not self.rules["rules"]:
            array = np.asarray(rows)
            if list(array.shape[1:]) != list(self.rules["shape"]):
                raise ValueError(
                    f"Samples must have the shape {self.rules['shape']}. Got {array.shape[1:]}."
                )
            if self.rules["dtype"] == "uint8":
                return array.astype(np.float32) / (255 if array.dtype == np.uint8 else 1)
            return array.astype(np.int64 if self.rules["dtype"].startswith("int") else np.float32)
        table = self._table(rows)
        return np.concatenate([self._feature(r, table) for r in self.rules["rules"]], 1)

    def _table(self, rows):
        if isinstance(rows, str | Path):
            with open(rows, newline="", encoding="utf-8-sig") as file:
                head, *lines = [line for line in csv.reader(file) if line]
            known = {rule["name"] for rule in self.rules["rules"]}
            if not known & set(head) and all(re.fullmatch(r"column_\d+", name) for name in known):
                # The clients' tables had no header either.
                lines = [head, *lines]
                head = [f"column_{i + 1}" for i in range(len(head))]
            return {
                name: [line[j] if j < len(line) else None for line in lines]
                for j, name in enumerate(head)
            }
        if hasattr(rows, "columns"):
            return {str(name): list(rows[name]) for name in rows.columns}
        return {name: list(values) for name, values in rows.items()}

    def _words(self, table, name):
        """The values of a column as text; None where one is missing."""
        if name not in table:
            raise ValueError(f"There must be a column '{name}'. Got {', '.join(table)}.")
        missing = set(self.rules["missing"])
        words = [_word(value) for value in table[name]]
        words = [None if word is None or word in missing else word for word in words]
        numbers = [None if word is None else _as_number(word) for word in words]
        if any(
            number is None and word is not None for number, word in zip(numbers, words, strict=True)
        ):
            return words  # a column is numbers only if all of its values are
        return [None if n is None else str(int(n)) if n.is_integer() else repr(n) for n in numbers]

    def _feature(self, rule, table):
        words = self._words(table, rule["name"])
        gone = np.array([word is None for word in words])
        kind = rule["kind"]
        if kind == "number":
            values = [np.nan if word is None else _number(word, rule["name"]) for word in words]
            out = np.where(gone, rule["fill"], values)[:, None]
            out = (out - rule["shift"]) / rule["scale"]
        elif kind == "boolean":
            values = [np.nan if word is None else _flag(word, rule["name"]) for word in words]
            out = np.where(gone, rule["fill"], values)[:, None]
            out = (out - rule["shift"]) / rule["scale"]
        elif kind == "text":
            columns = [rule["name"], *rule["with_columns"]]
            parts = zip(*(self._words(table, name) for name in columns), strict=True)
            out = _texts([" ".join(p for p in row if p is not None) for row in parts], rule)
        else:
            n = CATEGORY_BUCKETS if kind == "hashed" else len(rule["categories"])
            places = {category: j for j, category in enumerate(rule["categories"])}
            out = np.zeros((len(words), n))
            for i, word in enumerate(words):
                j = (
                    None
                    if word is None
                    else _hash(word) % n
                    if kind == "hashed"
                    else places.get(word)
                )
                if j is not None:
                    out[i, j] = 1
        out = np.concatenate([out, gone[:, None]], 1) if rule["missing"] else out
        return out.astype(np.float32)

    def _targets(self, rows):
        words = self._words(self._table(rows), self.rules["label"] or "y")
        if self.manifest["task"] == "classification":
            classes = self.manifest["classes"]
            places = {str(label): code for code, label in enumerate(classes or [])}
            return np.array([places[word] if classes else int(float(word)) for word in words])
        values = np.array([[float(word)] for word in words])
        mean, scale = self.rules["target_mean"], self.rules["target_scale"]
        return (values - np.array(mean)) / np.array(scale) if mean else values


def _load(file):
    if file.suffix == ".onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name
        return lambda x: session.run(None, {name: x})[0]
    if file.suffix == ".pt2":
        import torch

        module = torch.export.load(str(file)).module()
        return lambda x: module(torch.from_numpy(x)).detach().numpy()
    raise ValueError(f"{file.name} holds weights only. Load them into your own network.")


def _word(value):
    """A value as text."""
    if value is None or value != value:
        return None
    return str(bool(value)) if isinstance(value, bool | np.bool_) else str(value).strip()


def _as_number(word):
    try:
        number = float("" if "_" in word else word)  # Python reads 1_000
    except ValueError:
        return None
    return number if np.isfinite(number) else None


def _number(word, name):
    try:
        return float(word)
    except ValueError:
        raise ValueError(f"Column '{name}' must hold numbers. Got {word!r}.") from None


def _flag(word, name):
    flags = {"true": 1.0, "false": 0.0, "1": 1.0, "0": 0.0}
    if word.lower() not in flags:
        raise ValueError(f"Column '{name}' must hold true or false. Got {word!r}.")
    return flags[word.lower()]


def _hash(word):
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def _texts(texts, rule):
    """Weighted words in a few directions."""
    width, buckets = rule["n_directions"], rule["buckets"]
    out = np.zeros((len(texts), width))
    if not width:
        return out
    directions = np.frombuffer(base64.b64decode(rule["directions"]), "<f2").astype(float)
    directions = directions.reshape(-1, width)
    place = {bucket: j for j, bucket in enumerate(buckets)}
    for i, text in enumerate(texts):
        counts: dict[int, int] = {}
        for word in re.findall(r"\w+", text.lower()):
            j = place.get(_hash(word) % WORD_BUCKETS)
            if j is not None:
                counts[j] = counts.get(j, 0) + 1
        if counts:
            used = np.array(list(counts))
            weight = (1 + np.log(list(counts.values()))) * np.array(rule["weights"])[used]
            out[i] = weight @ directions[used] / np.linalg.norm(weight)
    return out
