"""Codes of wav2vec 2.0's pre-training: how they are chosen, and what they are compared with."""

import math

import pytest
import torch
from carnelian_training.models.pretraining import (
    PretrainingConfig,
    Quantiser,
    draw_others,
    gumbel_noise,
    hidden_frames,
)

SETTINGS = PretrainingConfig(groups=2, codes=8, code_width=8, width=6, negatives=10)


def test_hidden_frames_are_compared_with_others_of_the_same_clip_alone():
    mask = torch.tensor([[0, 1, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0]], dtype=torch.bool)
    index, real = hidden_frames(mask)
    assert index[0].tolist() == [1, 2, 4, 5]
    assert index[1, 0] == 3
    assert real.sum(1).tolist() == [4, 1, 0]

    def draws():
        return [torch.Generator().manual_seed(seed) for seed in (1, 2, 3)]

    others = draw_others(draws(), real, 200)
    for i in range(4):
        assert set(others[0, i].tolist()) == {0, 1, 2, 3} - {i}
    alone = draw_others([torch.Generator().manual_seed(1)], real[:1], 200)
    assert torch.equal(others[:1], alone)
    noise = gumbel_noise(draws(), real, SETTINGS)
    assert torch.equal(noise[:1], gumbel_noise(draws()[:1], real[:1], SETTINGS))
    assert noise[0].abs().min() > 0
    assert not noise[1, 1:].any()


def test_the_quantiser_chooses_codes_and_learns_through_the_soft_choice():
    torch.manual_seed(0)
    quantiser = Quantiser(4, SETTINGS)
    x = torch.randn(2, 5, 4)
    codes = quantiser(x, 1.0, None)
    logits = quantiser.choose(x).view(2, 5, 2, 8)
    assert torch.equal(codes.ids, logits.argmax(3))
    expected = quantiser.vectors[torch.arange(2), codes.ids].flatten(2)
    torch.testing.assert_close(codes.vectors, expected)
    noisy = quantiser(x, 0.5, torch.randn(2, 5, 2, 8))
    noisy.vectors.square().sum().backward()
    assert quantiser.choose.weight.grad.abs().sum() > 0


def test_the_temperature_falls():
    settings = PretrainingConfig(temperature=(2.0, 0.5), temperature_decay=0.5)
    assert [settings.temperature_at(step) for step in range(4)] == [2.0, 1.0, 0.5, 0.5]
    with pytest.raises(ValueError, match="`temperature` must fall"):
        PretrainingConfig(temperature=(0.5, 2.0))
    with pytest.raises(ValueError, match="`groups` must divide `code_width`"):
        PretrainingConfig(groups=3)


def test_noise_moves_the_choice_and_not_what_is_chosen():
    torch.manual_seed(0)
    quantiser = Quantiser(4, SETTINGS)
    x, noise = torch.randn(2, 5, 4), 9 * torch.randn(2, 5, 2, 8)
    codes = quantiser(x, 0.5, noise)
    logits = quantiser.choose(x).view(2, 5, 2, 8)
    assert torch.equal(codes.ids, (logits + noise).argmax(3))
    assert not torch.equal(codes.ids, logits.argmax(3))
    torch.testing.assert_close(codes.vectors, quantiser.vectors[torch.arange(2), codes.ids].flatten(2))
    torch.testing.assert_close(codes.probabilities, logits.softmax(3))


def test_the_noise_is_gumbels():
    noise = gumbel_noise([torch.Generator().manual_seed(1)], torch.ones(1, 4000), SETTINGS)
    assert noise.mean().item() == pytest.approx(0.5772, abs=0.03)  # Euler's constant
    assert noise.std().item() == pytest.approx(math.pi / 6**0.5, abs=0.03)
