"""Explain how a network is trained: which layers are stacked, which are not, and why."""

import importlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from coterie import models
from coterie.catalogue import import_file
from coterie.core.errors import ConfigError, unknown
from coterie.core.model import Model
from coterie.core.random import seed_key
from coterie.core.tree import n_bytes
from coterie.engines.stacking.chunks import MODELS
from coterie.engines.stacking.twins import STEPPING, TWINS, NoTwin, twin_of

DIGITS = SimpleNamespace(sample_shape=(1, 28, 28), n_outputs=10, task="classification")


def explain_name(name: str) -> str:
    """Explain a network by name."""
    return explain(Model(network(name)))


def network(name: str) -> Any:
    """Find a network by the name of a model, by `package.module:Name` or by `file.py:Name`."""
    place, colon, what = name.rpartition(":")
    if not colon:
        if name not in models.MODELS:
            known = [*models.MODELS, "package.module:Name", "file.py:Name"]
            raise ConfigError(unknown("model", name, known))
        return lambda: models.make(name, DIGITS)
    module = _module(place)
    found = getattr(module, what, None)
    if found is None:
        raise ConfigError(f"{name}: {place} must define '{what}'. It does not.")
    if isinstance(found, Model):
        return found.module
    if isinstance(found, nn.Module):
        return found
    try:
        made = found()
    except Exception as error:
        raise ConfigError(
            f"{name}: must be a network, or return one when called without arguments. "
            f"The call failed: {error}."
        ) from error
    if not isinstance(made, nn.Module):
        raise ConfigError(f"{name}: must be a network. Got {type(made).__name__}.")
    return found


def _module(place: str) -> ModuleType:
    if not place.endswith(".py"):
        try:
            return importlib.import_module(place)
        except ImportError as error:
            raise ConfigError(f"'{place}' cannot be imported: {error}.") from error
    return import_file(Path(place), "defines a network")


def explain(model: Model) -> str:
    """List the layers and how each is trained, then the plan of the engine."""
    try:
        own: tuple[str, ...] | None = twin_of(model).own
        kernel = "twins: one network of stacked weights, if three steps agree with single clients"
    except NoTwin as reason:
        own = None
        kernel = f"vmap of the gradient, otherwise one client after the other ({reason})"
    lines = [model.title, ""]
    for name, layer in model.training_network.named_modules():
        if any(True for _ in layer.children()) and not list(layer.parameters(recurse=False)):
            continue
        weights = sum(p.numel() for p in layer.parameters(recurse=False))
        lines.append(
            f"  {name or '(whole)':20} {type(layer).__name__:16} {weights:>10,} weights  "
            f"{_describe(layer, own is not None and name in own)}"
        )
    size = n_bytes(model.init(seed_key(0)))
    lines += [
        "",
        f"  kernel   {kernel}",
        "           gram, for a linear first layer: if plain SGD makes at least two passes over",
        "           fewer samples than the layer has inputs.",
        f"  chunk    {max(1, min(MODELS // max(size, 1), 4096)):,} clients "
        f"({size / 2**20:.2f} MB of weights each)",
        f"  threads  {torch.get_num_threads()}",
    ]
    return "\n".join(lines)


def _describe(layer: nn.Module, own: bool) -> str:
    if own:
        return "one client after the other: this kind of layer has no twin"
    if type(layer) in STEPPING:
        return "stacked; plain SGD updates it in the backward pass"
    if type(layer) in TWINS:
        return "stacked"
    if any(True for _ in layer.parameters(recurse=False)) or any(
        True for _ in layer.buffers(recurse=False)
    ):
        return "not stacked: weights outside a layer that has a twin"
    return "unchanged: no weights"
