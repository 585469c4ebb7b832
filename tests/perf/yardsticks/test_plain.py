import pytest
import torch
from carnelian_perf.yardsticks.plain import PlainQuartzNet
from carnelian_training.models.blocks import StageConfig
from carnelian_training.models.quartznet import QuartzNet, QuartzNetConfig
from torch.nn import functional as F

# Float32 sums in other orders, through a few layers and batch norm.
TOLERANCE = 2e-4
CONFIG = QuartzNetConfig(
    stages=(
        StageConfig(filters=32, kernel=11, stride=2, residual=False),
        StageConfig(filters=32, kernel=33, blocks=2, repeat=2),
        StageConfig(filters=48, kernel=15, repeat=2),
        StageConfig(filters=48, kernel=9, dilation=2, residual=False),
        StageConfig(filters=64, kernel=1, residual=False, separable=False),
    )
)


@pytest.mark.parametrize("lengths", [(96, 96), (90, 61), (97, 80)])
def test_the_plain_network_is_ours_in_values_and_gradients(lengths):
    torch.manual_seed(1)
    ours = QuartzNet(CONFIG, 29).train()
    plain = PlainQuartzNet.of(ours).train()
    shapes = {n: p.shape for n, p in plain.named_parameters()}
    features, targets = torch.randn(2, 64, max(lengths)), torch.randint(0, 28, (2, 12))
    results = []
    for network in (ours, plain):
        log_probs, frames = network(features, torch.tensor(lengths))
        loss = F.ctc_loss(log_probs.transpose(0, 1), targets, frames, torch.tensor([12, 12]), blank=28)
        loss.backward()
        results.append((log_probs, frames, {n: p.grad.reshape(shapes[n]) for n, p in network.named_parameters()}))
    (ours_scores, ours_frames, ours_grads), (plain_scores, plain_frames, plain_grads) = results
    assert ours_frames.tolist() == plain_frames.tolist()
    for row, length in enumerate(plain_frames):
        torch.testing.assert_close(
            ours_scores[row, :length], plain_scores[row, :length], atol=TOLERANCE, rtol=TOLERANCE
        )
    for name, gradient in plain_grads.items():
        scale = max(gradient.abs().max().item(), 1e-3)
        assert (ours_grads[name] - gradient).abs().max().item() < TOLERANCE * scale * 10, name
    statistics = {n: b for n, b in plain.named_buffers() if b.is_floating_point()}  # not how often they were updated
    for name, buffer in statistics.items():
        torch.testing.assert_close(dict(ours.named_buffers())[name], buffer, atol=TOLERANCE, rtol=TOLERANCE)
