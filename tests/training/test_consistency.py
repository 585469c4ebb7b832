"""CR-CTC: two views of each clip, and how far apart they are heard."""

from itertools import islice
from pathlib import Path

import pytest
import torch
from carnelian_training.config import config_from_dict
from carnelian_training.data.loading import Batch, _no_clips
from carnelian_training.data.manifest import read_manifest
from carnelian_training.distributed import Process
from carnelian_training.loop.ctc_loss import augmented, ctc_loss, disagreement
from carnelian_training.loop.recognition import shares
from carnelian_training.loop.state import new_state
from carnelian_training.loop.train import optimise
from carnelian_training.run_config import load_config
from torch.distributions import Categorical, kl_divergence

CPU = Process(torch.device("cpu"))


@pytest.fixture
def without_dropout(without_dropout, changed):
    return changed(without_dropout, loop={"batch_statistics": "frozen"})


@pytest.fixture
def batch(without_dropout):
    config = without_dropout
    share = next(iter(shares(read_manifest(config.data.dev), config, new_state(config, CPU))))
    return next(share.batches)


def test_disagreement_is_the_mean_of_both_divergences_over_the_frames_of_a_clip():
    one, other = (torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(i)).log_softmax(2) for i in range(2))
    found = disagreement(one, other, torch.tensor([7, 4]))
    first, second = (Categorical(logits=view) for view in (one, other))
    each = (kl_divergence(first, second) + kl_divergence(second, first)) / 2
    torch.testing.assert_close(found, torch.stack([each[0].sum(), each[1, :4].sum()]))


def test_each_view_is_drawn_to_the_other_as_it_stands():
    logits = [torch.randn(1, 3, 5, generator=torch.Generator().manual_seed(i)).requires_grad_() for i in range(2)]
    disagreement(*(view.log_softmax(2) for view in logits), torch.tensor([3])).sum().backward()
    # Of KL(other || one) by the logits of `one`: one - other. If it moved as well, more would come to it.
    apart = (logits[0].softmax(2) - logits[1].softmax(2)).detach() / 2
    torch.testing.assert_close(logits[0].grad, apart)
    torch.testing.assert_close(logits[1].grad, -apart)


def test_the_loss_is_of_two_views_and_of_what_lies_between_them(without_dropout, changed, batch):
    weight = 0.7
    config = changed(without_dropout, augment={"consistency": weight, "frequency_warp": 0.2})
    network = new_state(config, CPU).model.eval()
    views = [augmented(batch, config, CPU.device, view) for view in range(2)]
    assert not torch.equal(views[0]["features"], views[1]["features"])
    torch.testing.assert_close(views[0], augmented(batch, config, CPU.device))
    heard = [network(**view) for view in views]
    targets, target_lengths = batch.targets(config.labels)
    expected = weight * disagreement(heard[0][0], heard[1][0], heard[0][1])
    for log_probs, lengths in heard:
        per_clip = torch.nn.CTCLoss(blank=len(config.labels), reduction="none")
        expected = expected + per_clip(log_probs.transpose(0, 1), targets, lengths, target_lengths) / 2
    torch.testing.assert_close(ctc_loss(network, batch, config), expected)


def test_views_without_masks_agree(without_dropout, changed, batch):
    plain = changed(without_dropout, augment={"frequency_masks": 0, "time_masks": 0})
    network = new_state(plain, CPU).model.eval()
    twice = ctc_loss(network, batch, changed(plain, augment={"consistency": 5.0}))
    torch.testing.assert_close(twice, ctc_loss(network, batch, plain))


def test_a_share_without_clips_adds_nothing(without_dropout, changed):
    config = changed(without_dropout, augment={"consistency": 0.2})
    network = new_state(config, CPU).model
    loss = ctc_loss(network, _no_clips(64), config)
    assert loss.tolist() == [0.0]
    loss.sum().backward()
    assert all((parameter.grad == 0).all() for parameter in network.parameters())


@pytest.mark.parametrize(
    "spans",
    [{}, {"time_probability": 0.5}, {"channel_probability": 0.5, "channel_length": 4}],
    ids=["no masks", "masks of frames", "masks of channels"],
)
def test_wav2vec2_sees_two_views_as_well(batch, spans):
    tree = {
        "name": "waves",
        "model": {"name": "wav2vec2", "width": 16, "layers": 1, "heads": 2, "feed_forward": 16, "dropout": 0.0}
        | {"conv_channels": [8, 8], "conv_kernels": [80, 4], "conv_strides": [80, 4], "layer_drop": 0.0}
        | {"position_kernel": 4, "position_groups": 2, "attention_dropout": 0.0},
        "augment": {"spans": spans},
    }
    plain = config_from_dict(tree, "here")
    twice = config_from_dict({**tree, "augment": {"spans": spans, "consistency": 5.0}}, "here")
    samples = Batch(batch.items, torch.randn(len(batch.items), 1, 32000), torch.full((len(batch.items),), 32000))
    network = new_state(plain, CPU).model
    apart = ctc_loss(network, samples, twice) - ctc_loss(network, samples, plain)
    assert (apart.abs() < 1e-3).all() == (not spans)


def test_a_network_trained_so_hears_two_views_more_alike(tiny_config, changed, batch):
    def apart_after_training(weight):
        config = changed(tiny_config, augment={"consistency": weight}, optimizer={"lr": 0.01}, loop={"steps": 20})
        state = new_state(config, CPU)
        for share in islice(shares(read_manifest(config.data.dev), config, state), 20):
            assert optimise(state, share, config).is_finite
            state.step += 1
        views = [augmented(batch, config, CPU.device, view) for view in range(2)]
        (one, lengths), (other, _) = (state.model.eval()(**view) for view in views)
        return disagreement(one, other, lengths).sum().item()

    # 88 and 10 nats.
    without, with_it = (apart_after_training(weight) for weight in (0.0, 5.0))
    assert with_it < without / 2


def test_what_it_cannot_be_is_refused(tiny_config, changed):
    path = Path(__file__).parents[2] / "training" / "configs" / "wav2vec2_small.yaml"
    with pytest.raises(ValueError, match=r"`augment.consistency` must be 0 with `pretraining`, .* but is 0.2"):
        load_config(path, ("augment.consistency=0.2",))
    with pytest.raises(ValueError, match="`consistency` must be finite and at least 0, but is -1"):
        changed(tiny_config, augment={"consistency": -1})
