"""FedGMI's recipes: what Fig. 4 measures, on a small run of made images."""

from dataclasses import replace

import pytest
import torch

from coterie import LocalSGD, Model
from coterie.algorithms import Blend, FedGMI
from coterie.data import from_arrays
from coterie.models import VAE
from coterie.models.vae import bernoulli
from coterie.running.loop import Settings, run
from coterie_lab import recipes  # noqa: F401 - lists them
from coterie_lab.recipe import find
from coterie_lab.recipes.fedgmi import score_samples


def test_decoders_share_the_runs_of_the_tables():
    table = {
        study.name for name in ("fedgmi-table1", "fedgmi-table2") for study in find(name).studies()
    }
    assert {study.name for study in find("fedgmi-fig4").studies()} <= table


@pytest.mark.filterwarnings("ignore:Blend")
@pytest.mark.parametrize("kind", ["fedgmi", "blend"])
def test_samples_are_told_by_their_nearest_image(kind, tmp_path):
    # Bars that stand or lie, with noise; a VAE of one kind decodes images of that kind.
    key = torch.Generator().manual_seed(0)
    xs, parts = [], []
    for i in range(10):
        part = (torch.arange(40) >= 4 * (i + 0.5)).long()
        x = torch.rand(40, 1, 6, 6, generator=key) * 0.2
        x[part == 0, :, :, 2:4] += 0.8
        x[part == 1, :, 2:4, :] += 0.8
        xs.append(x)
        parts.append(part)
    data = from_arrays(xs, test_fraction=0.25)
    part = torch.cat(parts)
    shares = torch.stack([torch.stack([(p == c).double().mean() for c in (0, 1)]) for p in parts])
    data.extra.update(component=part, shares=shares)
    work = LocalSGD(0.01, epochs=3, batch_size=10, optimizer="adam")
    vae = Model(lambda: VAE((1, 6, 6), 2, (16,), "bernoulli"), bernoulli)
    if kind == "blend":
        method = Blend(vae, None, work, work, n_components=2, rounds=4, warm_rounds=3)
    else:
        method = FedGMI(vae, 2, local_vae=work, n_decoded=64)
    result = run(method, data, Settings(rounds=12, seed=0))
    assert score_samples(replace(result, folder=tmp_path))["decoded"] > 90
    assert (tmp_path / "decoded.png").exists()
