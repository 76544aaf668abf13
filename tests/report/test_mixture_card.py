"""What `coterie show` says of components inside clients."""

import warnings
from dataclasses import replace

import torch

from coterie.algorithms import Blend
from coterie.core import LocalSGD, Model
from coterie.core.random import normal, seed_key
from coterie.data import from_arrays
from coterie.models import MLP, VAE
from coterie.models.vae import gaussian
from coterie.report.cards import mixture_card, show_run
from coterie.running.build import Settings, build, describe
from coterie.running.folder import RunFolder
from coterie.running.loop import run


def mixed(clients=8, n=40):
    """Clients whose samples lie around -3 and 3, in shares from none to all."""
    xs, ys, part = [], [], []
    for i in range(clients):
        first = torch.arange(n) < i / (clients - 1) * n
        noise = normal(seed_key(i), (n, 4))
        xs.append(noise + torch.where(first, -3.0, 3.0)[:, None])
        ys.append((noise[:, 0] > 0).long())
        part.append(first.long())
    data = from_arrays(xs, ys, test_fraction=0.25)
    shares = torch.stack([p.double().mean() for p in part])
    return replace(data, extra={"shares": torch.stack([shares, 1 - shares], 1)})


def method():
    work = LocalSGD(0.01, epochs=2, batch_size=16, optimizer="adam")
    vae = Model(lambda: VAE((4,), 2, (16,), "gaussian"), gaussian)
    expert = Model(lambda: MLP(4, 2, (8,)))
    return Blend(vae, expert, work, work, n_components=2, warm_rounds=2, rounds=2)


def test_show_prints_shares_with_their_errors(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = run(method(), mixed(), Settings(10, evaluate_every=0), tmp_path / "run")
    text = show_run(RunFolder(tmp_path / "run"))
    assert "Components: 2. Clients differ in directions of strength" in text
    assert "share 0" in text
    assert "±" in text
    assert "error 0" not in text
    assert result.summary["mixture"]["mae"] < 0.15
    rows = (tmp_path / "run" / "final" / "clients.csv").read_text().splitlines()
    assert "share 0,error 0,share 1,error 1" in rows[0]


def test_a_card_says_when_shares_are_in_dispute():
    text = mixture_card({"n_components": 2, "tail_against_anchor": 0.2, "matched": [0.9, 0.8]})
    assert "quote both" in text
    assert "accuracy of each expert on its own component: 90.0%, 80.0%" in text


def test_a_run_file_builds_it_again():
    data = mixed()
    tables = {
        "algorithm": {"name": "blend", "rounds": 3},
        "vae": {"name": "vae", "latent": 2, "hidden": [8]},
        "data": {"given": True},
    }
    ready = build(tables, data=data)
    assert ready.algorithm.local_vae.optimizer == "adam"  # the method's own default
    assert ready.algorithm.vae.loss is gaussian
    assert ready.algorithm.model is not None
    again = describe(ready.algorithm, data, ready.settings)
    assert build(again, data=data).algorithm.vae.made_from == tables["vae"]


def test_without_labels_there_is_no_expert():
    batch = mixed().gather("train", torch.arange(8))
    data = from_arrays(list(batch.x), test_fraction=0.0)
    ready = build({"algorithm": {"name": "blend"}, "data": {"given": True}}, data=data)
    assert ready.algorithm.model is None
