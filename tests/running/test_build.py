import json

import pytest
import torch
from torch import nn

from coterie.algorithms import CLoVE
from coterie.core.errors import ConfigError, DataError
from coterie.core.model import Model
from coterie.data import from_arrays
from coterie.data.synthetic import blobs
from coterie.running.build import Run, Settings, build, check, describe, read
from small_runs import described, ready, toml


@pytest.mark.parametrize("method", ["ifca", "clove", "local_only", "fedavg"])
def test_describing_and_building_are_inverse(method):
    one = ready(method)
    tables = json.loads(json.dumps(describe(one.algorithm, one.data, one.settings)))
    again = build(tables)
    assert describe(again.algorithm, again.data, again.settings) == tables
    assert again.settings == one.settings
    assert again.data.fingerprint() == one.data.fingerprint()
    assert again.algorithm.local == one.algorithm.local


def test_toml_and_json_say_the_same(tmp_path):
    (tmp_path / "a.toml").write_text(toml(described()))
    (tmp_path / "a.json").write_text(json.dumps(described()))
    assert read(tmp_path / "a.toml") == read(tmp_path / "a.json") == described()


@pytest.mark.parametrize(("name", "text"), [("a.toml", "[run"), ("a.json", "{"), ("a.json", "[1]")])
def test_an_unreadable_run_file_is_one_sentence(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=rf"Run file .*{name} cannot be read"):
        read(tmp_path / name)


def test_a_missing_run_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot be read: it is a folder"):
        read(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        read(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"algorithm": {"name": "clov"}}, "Unknown algorithm 'clov'. Did you mean 'clove'"),
        ({"algorithm": {"n_grups": 3}}, "IFCA: Unknown option 'n_grups'. Did you mean 'n_groups'"),
        ({"algorithm": {"n_groups": 9}}, "n_groups must be at most the number of clients, 8"),
        ({"model": {"name": "mpl"}}, "Unknown model 'mpl'. Did you mean 'mlp'"),
        ({"model": {"hiden": [4]}}, "Unknown option of mlp 'hiden'. Did you mean 'hidden'"),
        ({"model": {"dtype": "int8"}}, "Model: dtype must be float32 or float64. Got 'int8'"),
        ({"model": {"import": "nowhere:Net"}}, "pass trust=['nowhere:Net'], or on the command"),
        ({"model": {"loss": "nowhere:f"}}, "line: --trust nowhere:f"),
        ({"local": {"augment": "os:system"}}, "'os:system' is code that is not part of Coterie"),
        ({"algorithm": {"name": "nowhere:Mine"}}, "--trust nowhere:Mine"),
        ({"model": {"hidden": [3_000_000, 3_000_000]}}, "must fit in memory"),
        ({"local": {"learning_rat": 1}}, "Unknown option 'learning_rat'. Did you mean 'learning_"),
        ({"data": {"name": "blob"}}, "Did you mean 'blobs'"),
        ({"data": {"clients": 3}}, "Unknown option of blobs 'clients'"),
        ({"run": {"round": 3}}, "Settings: Unknown option 'round'. Did you mean 'rounds'"),
        ({"run": {"rounds": -1}}, "Settings: rounds must be greater than or equal to 0. Got -1"),
        ({"run": {"participation": 0}}, "participation must be greater than 0. Got 0"),
        (
            {"run": {"engine": "stack"}},
            "engine must be 'stacked', 'loop', 'wire' or 'ray'. Got 'stack'",
        ),
        ({"loca": {"x": 1}}, "Unknown table of a run file 'loca'. Did you mean 'local'"),
    ],
)
def test_a_mistake_in_a_run_file_is_one_sentence(changes, sentence):
    with pytest.raises(ConfigError) as error:
        ready("ifca", 5, **changes)
    assert sentence in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("table", ["algorithm", "data"])
def test_tables_that_must_be_there(table):
    tables = described()
    del tables[table]
    with pytest.raises(ConfigError, match=rf"must have a table \[{table}\]"):
        build(tables)
    tables = described()
    del tables[table]["name"]
    with pytest.raises(ConfigError, match=rf"table \[{table}\] must have a name"):
        build(tables)


def test_a_network_may_be_imported():
    network = {"import": "torch.nn:Linear", "arguments": {"in_features": 2, "out_features": 3}}
    tables = described() | {"model": network}
    one = build(tables, trust=["torch.nn:Linear"])
    assert isinstance(
        one.algorithm.model.plain(one.algorithm.model.init(torch.tensor(0))), nn.Linear
    )
    assert describe(one.algorithm, one.data, one.settings)["model"] == network


def test_what_is_trusted_but_not_there_is_one_sentence():
    tables = described() | {"model": {"import": "nowhere:Net"}}
    with pytest.raises(ConfigError, match=r"'nowhere:Net' cannot be imported: .*Write it as"):
        build(tables, trust=["nowhere:Net"])


def test_given_objects_must_be_given_again_and_be_the_same():
    xs = [torch.arange(8.0).reshape(4, 2) + i for i in range(3)]
    data = from_arrays(xs, [torch.tensor([0, 1, 0, 1])] * 3)
    model = Model(nn.Linear(2, 2), "cross_entropy")
    tables = described("clove") | {"model": {}, "data": {}}
    one = build(tables, data=data, model=model)
    kept = json.loads(json.dumps(describe(one.algorithm, one.data, one.settings)))
    assert build(kept, data=data, model=model).data is data
    with pytest.raises(
        ConfigError, match=r"came from memory, and a file cannot name them\. Pass them: data="
    ):
        build(kept, model=model)
    with pytest.raises(ConfigError, match=r"model Linear was given as a module.* Pass it: model="):
        build(kept, data=data)
    other = from_arrays([x + 1 for x in xs], [torch.tensor([0, 1, 0, 1])] * 3)
    with pytest.raises(DataError, match="not those the run began with"):
        build(kept, data=other, model=model)
    with pytest.raises(ConfigError, match="Its weights have other names or shapes"):
        build(kept, data=data, model=Model(nn.Linear(2, 3), "cross_entropy"))


@pytest.mark.parametrize(
    ("network", "loss", "sentence"),
    [
        (nn.Linear(5, 3), "cross_entropy", r"Linear does not fit the data, whose samples have sh"),
        (
            nn.Linear(2, 2),
            "cross_entropy",
            r"Linear must have 3 outputs, one per class\. Got \(2",
        ),
        (nn.Linear(2, 3), lambda out, batch: out @ out, "loss of Linear does not fit its outputs"),
        (nn.Linear(2, 3), lambda out, batch: out.mean(), "one value per sample"),
    ],
)
def test_a_model_that_does_not_fit_the_data_is_refused_before_any_work(network, loss, sentence):
    one = ready("clove")
    wrong = CLoVE(Model(network, loss), one.algorithm.local, n_groups=2)
    with pytest.raises(ConfigError, match=sentence) as error:
        check(Run(wrong, blobs(n_groups=2, clients_per_group=2), Settings()))
    assert "\n" not in str(error.value)


def test_settings_convert_text_and_default():
    assert Settings(rounds="7").rounds == 7
    assert Settings() == Settings(rounds=20, seed=0, participation=1.0, restarts=1)
