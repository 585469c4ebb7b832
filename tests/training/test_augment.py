import pytest
import torch
from carnelian_training.config import AugmentConfig
from carnelian_training.data.augment import spec_augment, warp_frequency
from carnelian_training.features import FeatureSettings
from carnelian_training.mel import to_hz, to_mel

MEL = FeatureSettings()


def test_a_clip_is_augmented_alike_in_every_batch():
    config, lengths = AugmentConfig(frequency_warp=0.1), torch.tensor([90, 80, 70])
    features = torch.randn(3, 64, 90, generator=torch.Generator().manual_seed(0))
    for augment in (lambda x, n, s: spec_augment(x, n, config, s), lambda x, n, s: warp_frequency(x, MEL, config, s)):
        together, alone = augment(features, lengths, [7, 8, 9]), augment(features[1:2], lengths[1:2], [8])
        torch.testing.assert_close(together[1], alone[0])


def test_masks_stay_in_their_limits_and_follow_the_generator():
    config = AugmentConfig(
        frequency_masks=1, frequency_mask_bands=8, time_masks=1, time_mask_frames=20, time_mask_share=0.1
    )
    features, lengths = torch.ones(64, 64, 300), torch.full((64,), 300)
    masked, again = (spec_augment(features, lengths, config, range(64)) for _ in range(2))
    assert torch.equal(masked, again)
    bands = (masked == 0).all(2).sum(1)
    frames = (masked == 0).all(1).sum(1)
    assert 0 < bands.max() <= 8
    assert 0 < frames.max() <= 20
    assert len(set(bands.tolist())) > 4


def test_there_are_as_many_masks_as_configured():
    config = AugmentConfig(frequency_masks=2, frequency_mask_bands=4, time_masks=3, time_mask_frames=5)
    masked = spec_augment(torch.ones(200, 64, 300), torch.full((200,), 300), config, range(200)) == 0
    for axis, count in ((2, 2), (1, 3)):
        hidden = masked.all(axis).int()
        starts = (hidden.diff(dim=1) == 1).sum(1) + hidden[:, 0]
        assert starts.max() == count


def test_cutout_zeroes_boxes_within_the_clip():
    config = AugmentConfig(frequency_masks=0, time_masks=0, cutout_boxes=1, cutout_bands=20, cutout_frames=5)
    features, lengths = torch.ones(300, 64, 100), torch.full((300,), 50)
    cut = spec_augment(features, lengths, config, range(300)) == 0
    bands, frames = cut.any(2).sum(1), cut.any(1).sum(1)
    assert torch.equal(cut.sum((1, 2)), bands * frames)
    assert (bands.max(), frames.max()) == (20, 5)
    assert not cut[:, :, 50:].any()
    # Empty only where a width or a length of 0 was drawn: 1 / 21 and 1 / 6 of the clips.
    assert (bands == 0).float().mean() == pytest.approx(1 - 20 / 21 * 5 / 6, abs=0.06)


def test_warping_moves_a_tone_by_its_factor_in_hertz():
    mel_filters = torch.zeros(200, 64, 3)
    mel_filters[:, 40] = 1.0  # a tone in band 40, 2.8 kHz
    config = AugmentConfig(frequency_warp=0.1)
    warped = warp_frequency(mel_filters, MEL, config, range(200))
    bands = (warped[:, :, 0] * torch.arange(64)).sum(1) / warped[:, :, 0].sum(1)
    # Above 1 kHz a band is 0.695 mel, and 27 mel are a factor of 6.4 in Hz: +-10 % are about +-2 bands.
    assert bands.min() == pytest.approx(38.0, abs=0.3)
    assert bands.max() == pytest.approx(42.2, abs=0.3)
    unchanged = warp_frequency(mel_filters, MEL, AugmentConfig(), range(200))
    torch.testing.assert_close(unchanged, mel_filters)


def test_warping_goes_by_the_frequencies_that_the_bands_have():
    telephone = FeatureSettings(low_hz=300.0, high_hz=3400.0)
    low, high = to_mel(torch.tensor([telephone.low_hz, telephone.high_hz]))
    centres = to_hz(low + (torch.arange(64) + 1) * (high - low) / 65)
    config = AugmentConfig(frequency_warp=0.1)
    warped = warp_frequency(centres.repeat(200, 1)[:, :, None], telephone, config, range(200))[:, 20:44, 0]
    factors = warped / centres[20:44]
    assert (factors.max(1).values - factors.min(1).values).max() < 0.01  # one for all bands of a clip
    assert 0.9 < factors.min() < 0.91 < 1.09 < factors.max() < 1.1


def test_features_are_augmented_on_the_device_where_they_are():
    config = AugmentConfig(frequency_masks=1, time_masks=1, cutout_boxes=1, frequency_warp=0.1)
    features, lengths = torch.zeros(2, 64, 30, device="meta"), torch.tensor([30, 20], device="meta")
    warped = warp_frequency(features, MEL, config, range(2))
    assert spec_augment(warped, lengths, config, range(2)).is_meta


def test_a_time_mask_takes_its_share_of_the_clip_and_not_of_the_batch():
    config = AugmentConfig(frequency_masks=0, time_masks=1, time_mask_frames=50, time_mask_share=0.1)
    lengths = torch.tensor([300, 50]).repeat(50)
    frames = (spec_augment(torch.ones(100, 64, 300), lengths, config, range(100)) == 0).all(1)
    assert frames[0::2].sum(1).max() == 30
    assert frames[1::2].sum(1).max() == 5
    assert not frames[1::2, 50:].any()
