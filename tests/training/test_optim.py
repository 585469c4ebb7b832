import dataclasses

import pytest
import torch
from carnelian_training.checkpoint import build_model
from carnelian_training.config import OptimizerConfig
from carnelian_training.optim import NovoGrad, build_optimizer, learning_rate
from torch import nn


def test_learning_rate_warms_up_holds_and_decays():
    config = OptimizerConfig(lr=0.1, min_lr=0.01, warmup_steps=10, hold_steps=20)
    rates = [learning_rate(config, step, 130) for step in (0, 9, 10, 29, 30, 80, 129, 130, 500)]
    assert rates == pytest.approx([0.01, 0.1, 0.1, 0.1, 0.1, 0.055, 0.01, 0.01, 0.01], abs=1e-4)


def test_novograd_follows_the_papers_algorithm():
    parameter = nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer = NovoGrad([parameter], lr=0.1, betas=(0.9, 0.25), weight_decay=0.5, eps=0.0)
    expected, momentum, second = parameter.detach().clone(), torch.zeros(2), None
    for gradient in (torch.tensor([1.0, 2.0]), torch.tensor([-2.0, 0.5])):
        parameter.grad = gradient.clone()
        optimizer.step()
        squared = gradient.square().sum()
        second = squared if second is None else 0.25 * second + 0.75 * squared
        momentum = 0.9 * momentum + gradient / second.sqrt() + 0.5 * expected
        expected = expected - 0.1 * momentum
        torch.testing.assert_close(parameter.detach(), expected)


def test_adamw_does_not_decay_norms_and_biases(tiny_config):
    optimizer = dataclasses.replace(tiny_config.optimizer, weight_decay=0.3)
    config = dataclasses.replace(tiny_config, optimizer=optimizer)
    model = build_model(config)
    decayed, plain = build_optimizer(config, model).param_groups
    assert {p.ndim for p in decayed["params"]} == {4}
    assert decayed["weight_decay"] == 0.3
    assert {p.ndim for p in plain["params"]} == {1}
    assert plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))
