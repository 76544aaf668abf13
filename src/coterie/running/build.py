"""Run files: a run as plain data, and the objects it describes.

    [algorithm]   name and options of the method
    [model]       name and options of the network, or import = "package.module:Name" and arguments
    [local]       options of LocalSGD
    [data]        name and options of the data
    [run]         rounds, seed, participation, ... (`Settings`)

If a method has further networks or settings for local training, each has a table with the name of
its field.
"""

import hashlib
import json
import os
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, get_type_hints

import torch
from annotated_types import Ge, Gt, Le
from pydantic import BeforeValidator
from torch import nn

from coterie import algorithms, data, models
from coterie.core.algorithm import Algorithm, address_of, find
from coterie.core.config import check_fields, construct, find_imports, load
from coterie.core.errors import ConfigError, DataError, unknown
from coterie.core.model import Model
from coterie.core.policy import Policy, as_policy
from coterie.core.privacy import Privacy
from coterie.core.training import LocalSGD
from coterie.core.tree import named_leaves, tree_map
from coterie.data.federated import FederatedData
from coterie.running.evaluation import LOSS_OF
from coterie.running.files import RUN_FILE, is_deep
from coterie.running.start import check_start, read_start
from coterie.running.why import Part, choose_parts

assert algorithms  # imported for the methods it lists

Description = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How a method is run.

    Parameters
    ----------
    rounds
        Number of communication rounds.
    seed
        Seed of everything random except the data.
    participation
        Fraction of the clients that take part in a round.
    start
        Initial group of clients, by name: a mapping, or the path of a CSV file with the columns
        client and group. Clients that are not listed are assigned by the method.
    engine
        How the simulation runs clients: "stacked" computes many at once, "loop" one after the
        other, "wire" one after the other with every message turned into bytes, "ray" stacked in
        several processes, on this machine or on a Ray cluster.
    shards
        Number of processes of engine "ray"; each owns a part of the clients. None: one per core.
    address
        Address of the Ray cluster. None: this machine.
    chunk
        Number of clients per stack. None: chosen for the model and the data.
    threads
        Number of threads. None: PyTorch's default.
    workers
        Number of processes that run clients one after the other.
    kernel
        How a stack of clients is trained. "auto": chosen for the model.
    device
        PyTorch device.
    evaluate_every
        Number of rounds between evaluations; 0: only after the last round.
    save_every
        Number of rounds between checkpoints; 0: only after the last round.
    restarts
        Number of attempts with different initial models. The attempt with the lowest training loss
        is kept.
    support
        Which of its data an unassigned client uses to find its group during an evaluation.
    validation
        Fraction of every client's training data that is held out.
    stop
        When training ends. "rounds": after the last round, whose models are kept. "validation":
        after `patience` evaluations without a smaller loss on validation rows; the models of the
        round with the smallest loss are kept. `rounds` is then the largest number of rounds.
    patience
        Number of evaluations without improvement after which training stops, if `stop` is
        "validation".
    compare
        Also train every client alone and one model for all, to measure what grouping gains.
    replicates
        Number of trainings of each strategy that is compared. With two or more, the intervals of
        the verdict also cover the randomness of training. The first training is kept.
    why
        What clients send at the end so that `fit.why` can say in what groups differ: "columns"
        (count, mean and spread of each column), "labels" (their counts), "predictions" (what the
        model of each group says of their rows) and "images" (mean images by class). A list, words
        with commas between them, or "nothing". "auto": the first three in a simulation, nothing
        from real clients.
    drop
        Probability that a reply is lost, to test a method under faults.
    delay
        Mean time until a client replies, to test a method under faults.
    deadline
        Time after which a reply is too late. None: never.
    policy
        What is done about clients that lie, as options of `Policy`: how means are taken ("mean"),
        how many samples a client counts with at most ("cap"), after how many faulty replies it is
        asked no more ("strikes"). Options that are not given are those of the method: "plain" means
        for the methods of papers.
    privacy
        Client-level differential privacy, as options of `Privacy`: "epsilon", "delta", "noise",
        "clip", "answers". The run ends when the budget is used up. None: no noise.
    """

    rounds: Annotated[int, Ge(0)] = 20
    seed: Annotated[int, Ge(0)] = 0
    participation: Annotated[float, Gt(0), Le(1)] = 1.0
    start: dict[str, int] | None = None
    engine: Literal["stacked", "loop", "wire", "ray"] = "stacked"
    shards: Annotated[int, Ge(1)] | None = None
    address: str | None = None
    chunk: Annotated[int, Ge(1)] | None = None
    threads: Annotated[int, Ge(1)] | None = None
    workers: Annotated[int, Ge(1)] = 1
    kernel: Literal["auto", "gram", "twins", "vmap", "loop"] = "auto"
    device: str = "cpu"
    evaluate_every: Annotated[int, Ge(0)] = 1
    save_every: Annotated[int, Ge(0)] = 1
    restarts: Annotated[int, Ge(1)] = 1
    support: Literal["train", "test"] = "train"
    validation: Annotated[float, Ge(0), Le(0.9)] = 0.0
    stop: Literal["rounds", "validation"] = "rounds"
    patience: Annotated[int, Ge(1)] = 5
    compare: bool = False
    replicates: Annotated[int, Ge(1)] = 1
    why: Annotated[tuple[Part, ...] | Literal["auto"], BeforeValidator(choose_parts)] = "auto"
    drop: Annotated[float, Ge(0), Le(1)] = 0.0
    delay: Annotated[float, Ge(0)] = 0.0
    deadline: Annotated[float, Gt(0)] | None = None
    policy: dict[str, Any] | None = None
    privacy: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        check_fields(self)
        as_policy(self.policy)
        self.as_privacy()
        if self.privacy is not None and max(self.restarts, self.replicates) > 1:
            raise ConfigError(
                "Settings: with privacy there is one training, because each spends the budget. Got "
                f"restarts={self.restarts}, replicates={self.replicates}. Leave both out."
            )
        if self.engine != "ray" and (self.shards or self.address):
            raise ConfigError(
                f'Settings: shards and address belong to engine="ray". Got engine="{self.engine}".'
            )
        if self.stop == "validation" and not self.evaluate_every:
            raise ConfigError(
                'Settings: stop="validation" needs evaluations. Got evaluate_every=0. Set it to 1 '
                "or more."
            )

    def as_privacy(self) -> Privacy | None:
        """The privacy that was asked for."""
        return None if self.privacy is None else construct(Privacy, dict(self.privacy))


def policy_of(algorithm: Algorithm, settings: Settings) -> Policy:
    """The policy of a run: its own options, and for the others those of the method."""
    privacy = settings.as_privacy()
    if privacy is not None:
        return privacy.limit(as_policy(settings.policy))
    own, asked = dict(algorithm.policy), settings.policy or {}
    if "mean" in asked:
        own.pop("tell", None)
    return as_policy({**own, **asked})


@dataclass(frozen=True)
class Run:
    """A run that is ready to start."""

    algorithm: Algorithm
    data: FederatedData
    settings: Settings

    @cached_property
    def description(self) -> Description:
        """The run as plain data."""
        return describe(self.algorithm, self.data, self.settings)


def read(path: Path) -> Description:
    """A run file: TOML or JSON."""
    try:
        data = path.read_bytes() if path.stat().st_size <= RUN_FILE else b""
        if not data or is_deep(data):
            raise ValueError(f"it is empty, larger than {RUN_FILE // 2**20} MB, or nested deeply")
        content = tomllib.loads(data.decode()) if path.suffix == ".toml" else json.loads(data)
    except FileNotFoundError:
        raise ConfigError(f"Run file {path} does not exist.") from None
    except IsADirectoryError:
        raise ConfigError(
            f"Run file {path} cannot be read: it is a folder. To run on data in a folder: --data."
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"Run file {path} cannot be read: {error}.") from None
    if not isinstance(content, dict):
        raise ConfigError(f"Run file {path} cannot be read: it holds no tables.")
    return content


def build(description: Description, trust: Iterable[str] = (), **given: Any) -> Run:
    """The objects that a run file describes, checked.

    Parameters
    ----------
    description
        The tables of the run file.
    trust
        Objects that may be imported, each as "package.module:Name". Others are refused.
    given
        Objects that a file cannot name: `data=`, `model=` or another field of the method.
    """
    tables = {key: value for key, value in description.items() if isinstance(value, dict)}
    trust = tuple(trust)
    _, parts = find_parts(_name(_table(tables, "algorithm"), "algorithm"), trust)
    for table in tables:
        if table not in {"algorithm", "data", "run", "plan", *parts}:
            known = {"algorithm", "data", "run", *parts}
            raise ConfigError(unknown("table of a run file", table, known))
    settings = dict(tables.get("run", {}))
    if settings.get("start") is not None:
        settings["start"] = read_start(settings["start"])
    options = construct(Settings, settings)
    source = make_data(_table(tables, "data"), given.get("data"))
    ready = Run(build_algorithm(description, source, trust, **given), source, options)
    check(ready)
    return ready


def build_algorithm(
    description: Description, source: Any, trust: Iterable[str] = (), **given: Any
) -> Algorithm:
    """The method of a run file, for data of some kind (`FederatedData` or `DataCard`)."""
    tables = {key: value for key, value in description.items() if isinstance(value, dict)}
    trust = tuple(trust)
    cls, parts = find_parts(_name(_table(tables, "algorithm"), "algorithm"), trust)
    options = {key: value for key, value in tables["algorithm"].items() if key != "name"}
    optional = {field.name for field in fields(cls) if field.default is not MISSING}
    for name, kind in parts.items():
        left_out = name in optional and name not in tables and name not in given
        if left_out and (kind is LocalSGD or source.task == "reconstruction"):
            continue  # the method's own default
        table = dict(tables.get(name, {}))
        if name in models.MODELS and not {"name", "import", "given"} & set(table):
            table = {"name": name, **table}
        if kind is LocalSGD:
            named = {key: _function(value, trust) for key, value in table.items()}
            options[name] = construct(LocalSGD, named)
        else:
            options[name] = make_model(table, source, given.get(name), trust)
    return construct(cls, options)


def find_parts(name: str, trust: Iterable[str] = ()) -> tuple[type[Algorithm], dict[str, type]]:
    """The class of a method, and its fields that have a table of their own in a run file."""
    cls = find(name, trust)
    hints = get_type_hints(cls)
    kinds = {Model: Model, Model | None: Model, LocalSGD: LocalSGD}
    return cls, {name: kinds[hint] for name, hint in hints.items() if hint in kinds}


def _table(tables: dict[str, Any], name: str) -> dict[str, Any]:
    if name not in tables:
        raise ConfigError(
            f"A run file must have a table [{name}]. Got: {', '.join(tables) or 'none'}."
        )
    return dict(tables[name])


def _name(table: dict[str, Any], kind: str) -> str:
    if "name" not in table:
        raise ConfigError(f"A run file's table [{kind}] must have a name.")
    return str(table.pop("name"))


def make_data(table: Description, given: FederatedData | None = None) -> FederatedData:
    """Data by name and options; or the given data, if they are those the run began with."""
    if "given" in table or given is not None:
        if given is None:
            raise ConfigError(
                "The data of this run came from memory, and a file cannot name them. Pass them: "
                "data=..."
            )
        expected = table.get("fingerprint")
        if expected is not None and given.fingerprint() != expected:
            raise DataError(
                "The given data are not those the run began with. Pass the same data, or start a "
                "new run."
            )
        return given
    table = dict(table)
    return data.make(_name(table, "data"), **table)


def make_model(
    table: Description,
    source: Any,
    given: nn.Module | Model | None = None,
    trust: Iterable[str] = (),
) -> Model:
    """A model by name, by import path if that is trusted, or as given."""
    if "given" in table or given is not None:
        if given is None:
            raise ConfigError(
                f"The model {table['given']} was given as a module, and a file cannot name it. "
                "Pass it: model=..."
            )
        given = as_model(given, source.task)
        if table.get("fingerprint", fingerprint(given)) != fingerprint(given):
            raise ConfigError(
                "The given model must be the one the run began with. Its weights have other names "
                "or shapes. Pass the same model."
            )
        return given
    options = dict(table)
    loss = _function(options.pop("loss", None), trust)
    head = options.pop("head", None)
    head = tuple(head) if isinstance(head, list) else head
    dtype = getattr(torch, str(options.pop("dtype", "float32")), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ConfigError(f"Model: dtype must be float32 or float64. Got {table['dtype']!r}.")
    if "import" in options:
        module = load(str(options["import"]), trust)
        arguments = options.get("arguments", {})
        make: Any = lambda: module(**arguments)  # noqa: E731 - drawn anew for every key
    else:
        name = str(options.pop("name", "mlp"))
        facts = ("sample_shape", "n_outputs", "task")
        sized = SimpleNamespace(**{fact: getattr(source, fact) for fact in facts})
        with torch.device("meta"):  # counts weights without memory for them
            _refuse_huge(models.make(name, sized, **options))
        make = models.make(name, source, **options)
    # A density model brings its own loss; all others take that of the task.
    loss = loss or getattr(make, "loss", LOSS_OF[source.task])
    return Model(make, loss, head, dtype, made_from=table)


def _refuse_huge(network: nn.Module) -> None:
    """Refuse a network that this machine cannot hold once."""
    n = sum(leaf.numel() * leaf.element_size() for leaf in network.parameters())
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if n > memory:
        raise ConfigError(
            f"Model: the network must fit in memory, {memory / 2**30:.0f} GB here. It has "
            f"{n / 2**30:,.0f} GB of weights. Choose smaller layers."
        )


def build_model(
    model: str | Mapping[str, Any] | nn.Module | Model | None, data: FederatedData
) -> Model:
    """A network as users give it: a name, a name with options, a module, or None: chosen."""
    if isinstance(model, nn.Module | Model):
        return as_model(model, data.task)
    table = name_model(model, data)
    return make_model(table, data, trust=find_imports(table))  # the user's own words


def name_model(model: str | Mapping[str, Any] | None, data: FederatedData) -> Description:
    """The table [model] of a run file, from a name, options, or None: chosen from the data."""
    if isinstance(model, str):
        return {"name": model}
    options = dict(model or {})
    return (
        options if {"name", "import"} & set(options) else {"name": suggest_model(data), **options}
    )


def as_model(model: nn.Module | Model, task: str) -> Model:
    """A network with the loss of a task."""
    return model if isinstance(model, Model) else Model(model, LOSS_OF[task])


def suggest_model(data: FederatedData) -> str:
    """The name of a network for a kind of data: a small "cnn" for images, otherwise an "mlp"."""
    shape = data.sample_shape
    return "cnn" if not isinstance(shape, dict) and len(shape) == 3 else "mlp"


def _function(value: Any, trust: Iterable[str]) -> Any:
    return load(value, trust) if isinstance(value, str) and ":" in value else value


def check(ready: Run) -> None:
    """Refuse before any work what cannot be run: too many groups, a wrong start, a wrong model."""
    algorithm, data = ready.algorithm, ready.data
    groups = getattr(algorithm, "n_groups", None)
    if groups is not None and groups > len(data):
        raise ConfigError(
            f"{type(algorithm).__name__}: n_groups must be at most the number of clients, "
            f"{len(data)}. Got {groups}."
        )
    held = bool(ready.settings.validation) or bool(data.sizes("validation").any())
    if ready.settings.stop == "validation" and not held:
        raise ConfigError(
            'stop="validation" needs validation rows. Got none. Hold some out with validation=0.2.'
        )
    if ready.settings.start is not None:
        check_start(ready.settings.start, algorithm, data.names)
    model = getattr(algorithm, "model", None)
    if isinstance(model, Model):
        check_model(model, data)


def check_model(model: Model, source: FederatedData) -> None:
    """Refuse a model whose inputs, outputs or loss do not fit the data."""
    batch = source.gather("train", torch.tensor([0]))
    batch = tree_map(lambda leaf: leaf[0, :2], batch)
    try:
        with torch.no_grad():
            output = model.apply(model.init(torch.tensor(0)), batch.x)
    except Exception as error:
        raise ConfigError(
            f"Model: {model.title} does not fit the data, whose samples have shape "
            f"{source.sample_shape} ({str(error).splitlines()[0]})."
        ) from error
    if source.task == "classification" and (output.ndim < 2 or output.shape[1] < source.n_outputs):
        got = tuple(output.shape[1:])
        raise ConfigError(
            f"Model: {model.title} must have {source.n_outputs} outputs, one per class. Got {got}."
        )
    try:
        with torch.no_grad():
            losses = model.loss_of(output, batch)
    except Exception as error:
        raise ConfigError(
            f"Model: the loss of {model.title} does not fit its outputs, which have shape "
            f"{list(output.shape[1:])} ({str(error).splitlines()[0]})."
        ) from error
    if losses.shape != batch.mask.shape:
        raise ConfigError(
            f"Model: the loss must give one value per sample. Got shape {tuple(losses.shape)} for "
            f"{len(batch.mask)} samples."
        )


def describe(algorithm: Algorithm, source: Any, settings: Settings) -> Description:
    """A run as plain data; `build` makes the run again."""
    tables: Description = {"algorithm": {"name": address_of(algorithm)}}
    for field in fields(algorithm):
        value = getattr(algorithm, field.name)
        if isinstance(value, Model):
            unnamed = {"given": value.title, "fingerprint": fingerprint(value)}
            tables[field.name] = unnamed if value.made_from is None else value.made_from
        elif isinstance(value, LocalSGD):
            tables[field.name] = _changed(value)
        elif field.default is MISSING or value != field.default:
            tables["algorithm"][field.name] = value
    if source.name is not None and source.options is not None:
        tables["data"] = {"name": source.name, **source.options}
    else:
        tables["data"] = {"given": True, "fingerprint": source.fingerprint()}
    tables["run"] = _changed(settings)
    return tables


def _changed(value: Any) -> Description:
    """The options of a dataclass that are not the default."""
    return {
        field.name: _named(getattr(value, field.name))
        for field in fields(value)
        if getattr(value, field.name) != field.default
    }


def _named(value: Any) -> Any:
    if not isinstance(value, Callable):  # type: ignore[arg-type]
        return value
    return f"{value.__module__}:{value.__qualname__}"


def fingerprint(model: Model) -> str:
    """Checksum of a model's names and shapes."""
    drawn = model.init(torch.tensor(0))
    text = json.dumps([["/".join(path), list(leaf.shape)] for path, leaf in named_leaves(drawn)])
    return hashlib.sha256(text.encode()).hexdigest()
