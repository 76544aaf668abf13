"""Shares, chances and mixtures of several predictors, by hand."""

import math

import pytest
import torch

from coterie.algorithms.components import evidence_of
from coterie.algorithms.experts import (
    fit_shares,
    mean_share,
    mix_outputs,
    responsibilities,
    weight_of_batch,
)
from coterie.core import Model
from coterie.core.layers import Mode, entering
from coterie.models import LinearRegressor
from tiny import batch


def test_chances_are_shares_times_likelihoods():
    fit = torch.tensor([[0.0, math.log(3.0)], [math.log(4.0), 0.0]])
    chances = responsibilities(fit, torch.tensor([0.25, 0.75]).double())
    # 1/4 * 1 against 3/4 * 3, and 1/4 * 4 against 3/4
    assert chances.flatten().tolist() == pytest.approx([0.1, 0.9, 4 / 7, 3 / 7])


def test_chances_stay_finite_where_a_model_has_diverged():
    fit = torch.tensor([[torch.nan, -1.0], [-torch.inf, -torch.inf]])
    chances = responsibilities(fit, torch.tensor([0.5, 0.5]).double())
    assert chances.tolist() == [[0.0, 1.0], [0.5, 0.5]]


def test_shares_are_means_over_real_samples_and_can_be_smoothed():
    rows = batch(torch.zeros(3, 1), mask=[True, True, False])
    chances = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]]).double()
    assert mean_share(chances, rows).tolist() == [0.75, 0.25]
    assert mean_share(chances, rows, 0.5).tolist() == pytest.approx([0.625, 0.375])


def test_the_best_shares_of_components_that_stay():
    # Three samples that only the first component explains, one that only the second does.
    fit = torch.tensor([[0.0, -50.0]] * 3 + [[-50.0, 0.0]])
    share = fit_shares(fit, batch(torch.zeros(4, 1)))
    assert share.tolist() == pytest.approx([0.75, 0.25])


def test_weighted_losses_are_divided_by_the_number_of_rows():
    rows = batch(torch.zeros(4, 1), mask=[True, True, True, False])
    rows = rows._replace(weight=torch.tensor([1.0, 0.5, 0.0, 9.0]))
    losses = torch.tensor([2.0, 4.0, 8.0, 100.0])
    value = rows.mean(losses * weight_of_batch(rows))
    assert float(value) == pytest.approx((1 * 2 + 0.5 * 4 + 0 * 8) / 3)
    # Two clients in one batch of a kernel: each has its own mean weight.
    with entering(Mode(True, clients=2)):
        pair = batch(torch.zeros(4, 1))._replace(weight=torch.tensor([1.0, 0.0, 3.0, 1.0]))
        assert weight_of_batch(pair).tolist() == [0.5, 0.5, 2.0, 2.0]


def test_probabilities_are_mixed_not_logits():
    class Constant(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.zeros(2))

        def forward(self, x):
            return self.logits.expand(len(x), 2)

    bank = {"logits": torch.tensor([[math.log(3.0), 0.0], [0.0, math.log(9.0)]])}
    x = torch.zeros(2, 1)
    # 1/2 (3/4, 1/4) + 1/2 (1/10, 9/10)
    out = mix_outputs(Model(Constant), bank, x, torch.tensor([0.5, 0.5]).log())
    assert out[0].exp().tolist() == pytest.approx([0.425, 0.575])
    # Shares of each sample: the second one is of the second component alone.
    out = mix_outputs(Model(Constant), bank, x, torch.tensor([[0.5, 0.5], [0.0, 1.0]]).log())
    assert out.exp().flatten().tolist() == pytest.approx([0.425, 0.575, 0.1, 0.9])


def test_numbers_are_mixed_by_their_mean():
    bank = {"weight": torch.tensor([[1.0], [5.0]])}
    model = Model(LinearRegressor(1), "squared_error")
    out = mix_outputs(model, bank, torch.ones(2, 1), torch.tensor([0.75, 0.25]).log())
    assert out.tolist() == pytest.approx([2.0, 2.0])


def test_evidence_is_the_lead_of_the_largest_share():
    found = evidence_of(torch.tensor([[0.2, 0.7, 0.1], [1.0, 0.0, 0.0]]).double())
    assert found.group.tolist() == [1, 0]
    assert found.margin.tolist() == pytest.approx([0.5, 1.0])
    assert evidence_of(torch.ones(1, 1).double()).margin.tolist() == [1.0]
