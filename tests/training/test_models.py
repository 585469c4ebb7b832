from pathlib import Path

import pytest
import torch
from carnelian_training.checkpoint import build_network
from carnelian_training.models import blocks, masked, network
from carnelian_training.models.blocks import Block, StageConfig
from carnelian_training.models.jasper import Jasper, JasperConfig, JasperStageConfig
from carnelian_training.models.masked import FOLD, Mask, MaskedBatchNorm, MaskedConv
from carnelian_training.models.quartznet import QuartzNet, QuartzNetConfig
from carnelian_training.run_config import load_config
from torch.nn import functional as F

CONFIGS = Path(__file__).parents[2] / "training" / "configs"
# Different batch shapes make oneDNN add the same numbers in another order.
TOLERANCE = 1e-4


def tiny(head_frames: int = 1, **stage) -> QuartzNet:
    stages = (
        StageConfig(filters=16, kernel=5, stride=2, residual=False),
        StageConfig(filters=24, kernel=7, repeat=2, **stage),
        StageConfig(filters=16, kernel=5, dilation=2, residual=False),
    )
    torch.manual_seed(0)
    return QuartzNet(QuartzNetConfig(stages=stages, head_frames=head_frames), 29)


def tiny_jasper(**settings) -> Jasper:
    stages = (
        JasperStageConfig(filters=16, kernel=5, stride=2, residual=False),
        JasperStageConfig(filters=24, kernel=7, blocks=2, repeat=2),
        JasperStageConfig(filters=32, kernel=3, repeat=2),
        JasperStageConfig(filters=16, kernel=5, dilation=2, residual=False),
    )
    torch.manual_seed(0)
    return Jasper(JasperConfig(stages=stages, **settings), 29)


MODELS = {"quartznet": tiny, "quartznet, two frames": lambda: tiny(head_frames=2), "jasper": tiny_jasper}


@pytest.mark.parametrize(
    ("name", "parameters", "stride"),
    [
        ("quartznet_15x5", 18_924_381, 2),  # as NeMo builds it with 29 labels
        ("quartznet_10x5", 12_818_781, 2),  # 12.8 M in the paper, table 1
        ("quartznet_5x3", 6_407_005, 2),  # 6.4 M in the paper's results for WSJ
        ("jasper_10x5dr", 332_632_349, 2),  # as NVIDIA's "Jasper Large"
        ("quartznet_demo", 3_235_578, 2),
        ("wav2vec2_base", 95_044_608, 320),  # as facebook/wav2vec2-base
        ("wav2vec2_large", 317_390_592, 320),  # as facebook/wav2vec2-large-lv60
        ("wav2vec2_base_100h", 94_394_013, 320),  # 32 rows of the head in transformers, 29 here
    ],
)
def test_parameter_counts(name, parameters, stride):
    config = load_config(CONFIGS / f"{name}.yaml")
    with torch.device("meta"):
        assert sum(p.numel() for p in build_network(config).parameters()) == parameters
    assert config.model.stride == stride


@pytest.fixture
def two_threads():
    """Two threads for PyTorch, as users have several; the other tests have one."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", MODELS)
def test_log_probabilities_do_not_depend_on_the_batch(name):
    model = MODELS[name]().eval()
    head_frames = model.config.head_frames
    lengths = torch.tensor([120, 77, 1, 48])
    features = torch.randn(4, 64, 120)
    with torch.inference_mode():
        batch, out_lengths = model(features, lengths)
        assert out_lengths.tolist() == [60 * head_frames, 77 if head_frames == 2 else 39, 1, 24 * head_frames]
        features[1, :, 77:] = torch.nan  # whatever is in the padding
        again, _ = model(features, lengths)
        for i, length in enumerate(lengths):
            alone, _ = model(features[i : i + 1, :, :length], lengths[i : i + 1])
            torch.testing.assert_close(batch[i, : out_lengths[i]], alone[0], atol=TOLERANCE, rtol=0)
            torch.testing.assert_close(again[i, : out_lengths[i]], alone[0], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_training_gradients_do_not_depend_on_padding(name):
    lengths = torch.tensor([40, 26])
    features = torch.randn(2, 64, 40)
    features[1, :, 26:] = 0
    gradients = []
    for padding in (0, 24):
        model = MODELS[name]().train()
        log_probs, out_lengths = model(F.pad(features, (0, padding)), lengths)
        loss = F.ctc_loss(
            log_probs.transpose(0, 1), torch.tensor([1, 2, 3, 4]), out_lengths, torch.tensor([2, 2]), blank=28
        )
        loss.backward()
        gradients.append([p.grad for p in model.parameters()])
    for unpadded, padded in zip(*gradients, strict=True):
        torch.testing.assert_close(unpadded, padded, atol=TOLERANCE, rtol=1e-3)


def test_batch_norm_statistics_see_real_frames_only():
    norm = MaskedBatchNorm(3)
    x = torch.randn(2, 3, 1, 10)
    mask = Mask.from_lengths(torch.tensor([10, 4]), 10)
    y = norm(x, mask)
    real = torch.cat([x[0, :, 0], x[1, :, 0, :4]], dim=1)
    torch.testing.assert_close(norm.running_mean, 0.1 * real.mean(1))
    torch.testing.assert_close(norm.running_var, 0.9 + 0.1 * real.var(1))
    assert not y[1, :, :, 4:].any()


def test_a_strided_pointwise_convolution_keeps_its_frames():
    conv = MaskedConv(8, 8, 1, stride=2).train()
    x = torch.randn(2, 8, 1, 48)  # sixteen parts of three
    torch.testing.assert_close(conv(x), F.conv2d(x, conv.weight, stride=(1, 2)))


@pytest.mark.parametrize("frames", [1, 3, 100, 101])
@pytest.mark.parametrize("dilation", [2, 3])
def test_folded_dilation_equals_a_dilated_convolution(frames, dilation):
    conv = MaskedConv(8, 8, 9, dilation=dilation, groups=8)
    x = torch.randn(2, 8, 1, frames)
    expected = F.conv2d(x, conv.weight, padding=(0, 4 * dilation), dilation=(1, dilation), groups=8)
    torch.testing.assert_close(conv(x), expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"filters": 8, "kernel": 4}, "`kernel` must be odd"),
        ({"filters": 8, "kernel": 3, "stride": 2}, "keeps the frame rate"),
        ({"filters": 0, "kernel": 3}, "`filters` must be at least 1"),
        ({"filters": 8, "kernel": 3, "dropout": 1.0}, "`dropout` must be at least 0 and below 1"),
        ({"filters": 8, "kernel": 3, "stride": 2, "dilation": 2}, "only one of `stride` and `dilation`"),
    ],
)
def test_impossible_stages_are_refused(wrong, message):
    with pytest.raises(ValueError, match=message):
        StageConfig(**wrong)


def assert_scored_as_alone(model, clips, starts, row):
    """A network of stride 2 gives each clip in a row, [1, mels, frames], what it gives the clip alone."""
    valid = torch.zeros(1, 1, 1, row.shape[2], dtype=torch.bool)
    for clip, start in zip(clips, starts, strict=True):
        row[..., start : start + clip.shape[2]] = clip
        valid[..., start : start + clip.shape[2]] = True
    with torch.inference_mode():
        found = model.score(row, Mask(valid))
        for clip, start in zip(clips, starts, strict=True):
            expected, lengths = model(clip, torch.tensor([clip.shape[2]]))
            end = start // 2 + int(lengths[0])
            torch.testing.assert_close(found[:, start // 2 : end], expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["quartznet", "jasper"])
def test_clips_in_one_row_do_not_touch_if_they_keep_their_distance(name):
    model = MODELS[name]().eval()
    assert (model.config.stride, max(model.config.reaches)) == (2, 8)
    clips = [torch.randn(1, 64, frames) for frames in (31, 7, 20)]
    starts = [0, 40, 56]  # even, and at least 8 frames after the end before
    assert_scored_as_alone(model, clips, starts, torch.full((1, 64, 76), torch.nan))


def test_the_head_makes_whole_numbers_of_frames():
    with pytest.raises(ValueError, match="must divide the stages' stride, 2, but is 3"):
        tiny(head_frames=3)


def test_each_dense_block_adds_the_inputs_of_all_dense_blocks_before_it():
    assert [len(block.earlier) for block in tiny_jasper().blocks] == [0, 0, 1, 2, 0]
    assert [len(block.earlier) for block in tiny_jasper(dense=False).blocks] == [0, 0, 0, 0, 0]
    block = tiny_jasper().eval().blocks[2]
    x, earlier = torch.randn(1, 24, 1, 9), torch.randn(1, 16, 1, 9)
    mask = Mask.from_lengths(torch.tensor([9]), 9)
    body = x
    for i, sub_block in enumerate(block.sub_blocks):
        body, _ = sub_block(body if i == 0 else body.relu(), mask)
    body = body + block.projection_norm(block.projection(x), mask) + block.earlier[0](earlier, mask)
    torch.testing.assert_close(block(x, mask, [earlier])[0], body.relu())


def test_dense_blocks_come_in_a_row():
    stages = [JasperStageConfig(filters=8, kernel=3, residual=is_residual) for is_residual in (True, False, True)]
    with pytest.raises(ValueError, match="residual ones in a row"):
        JasperConfig(stages=tuple(stages))
    JasperConfig(stages=tuple(stages), dense=False)


@pytest.mark.parametrize("lengths", [(50, 50), (47, 31)])
def test_folding_time_into_small_batches_changes_no_score_and_no_gradient(lengths, monkeypatch):
    torch.manual_seed(0)
    stages = (
        StageConfig(filters=8, kernel=5, stride=2, residual=False),
        StageConfig(filters=8, kernel=5, repeat=2),
        StageConfig(filters=12, kernel=1, residual=False, separable=False),
    )
    model = QuartzNet(QuartzNetConfig(stages=stages), 5).train()
    features, weights = torch.randn(2, 64, 50), torch.randn(2, 25, 5)
    results = []
    for fold in (FOLD, 0):
        for module in (masked, network):
            monkeypatch.setattr(module, "FOLD", fold)
        log_probs, frames = model(features, torch.tensor(lengths))
        real = torch.arange(25) < frames[:, None]
        loss = (log_probs * weights)[real].sum()
        results.append((log_probs[real], *torch.autograd.grad(loss, list(model.parameters()))))
    for folded, plain in zip(*results, strict=True):
        torch.testing.assert_close(folded, plain, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("out_channels", "groups", "bias"), [(24, 1, False), (24, 1, True), (16, 16, False)])
def test_convolutions_of_width_1_in_bfloat16_are_those_of_pytorch(out_channels, groups, bias):
    torch.manual_seed(0)
    conv = MaskedConv(16, out_channels, 1, groups=groups, bias=bias).train()
    x = torch.randn(3, 16, 1, 7).to(memory_format=torch.channels_last).requires_grad_()
    upstream = torch.randn(3, out_channels, 1, 7)
    found = []
    for run in (conv, lambda x: F.conv2d(x, conv.weight, conv.bias, groups=groups)):
        with torch.autocast("cpu", torch.bfloat16):
            result = run(x)
        loss = (result.float() * upstream).sum()
        found.append((result.float(), *torch.autograd.grad(loss, [x, *conv.parameters()])))
    assert found[0][0].is_contiguous(memory_format=torch.channels_last)
    for ours, reference in zip(*found, strict=True):
        torch.testing.assert_close(ours, reference, atol=0.02, rtol=0.02)


def test_dropout_follows_each_sub_block_in_training(monkeypatch):
    dropped = []

    def spy(x, probability, training):
        dropped.append((probability, training))
        assert (x >= 0).all()  # after the ReLU
        return 0 * x - len(dropped)

    monkeypatch.setattr(blocks, "dropout", spy)
    block = Block(4, StageConfig(filters=4, kernel=3, repeat=3, dropout=0.3))
    x, mask = torch.randn(1, 4, 1, 9), Mask.from_lengths(torch.tensor([9]), 9)
    for is_training in (True, False):
        out, _ = block.train(is_training)(x, mask)
        assert dropped == [(0.3, is_training)] * 3
        assert torch.equal(out, torch.full_like(x, -3.0))  # nothing comes after the last one
        dropped.clear()


def test_what_follows_the_stride_of_a_block_reaches_further():
    stage = StageConfig(filters=16, kernel=5, stride=2, repeat=2, residual=False)
    torch.manual_seed(0)
    model = QuartzNet(QuartzNetConfig(stages=(stage,)), 29).eval()
    assert model.config.reaches == [4]
    clips, starts = [torch.randn(1, 64, frames) for frames in (8, 6)], [0, 12]
    assert_scored_as_alone(model, clips, starts, torch.zeros(1, 64, 18))


def test_a_batch_of_one_frame_can_be_learnt_from():
    norm = MaskedBatchNorm(3)
    mask = Mask.from_lengths(torch.tensor([1]), 4)
    out = norm(torch.randn(1, 3, 1, 4, requires_grad=True), mask)
    out.sum().backward()
    assert out.isfinite().all()
    assert not norm.running_mean.any()
    assert (norm.running_var == 1).all()


@pytest.mark.filterwarnings("ignore")  # PyTorch warns of how it uses itself
def test_compiling_takes_in_all_but_what_depends_on_the_data():
    network = QuartzNet(QuartzNetConfig(stages=(StageConfig(filters=8, kernel=3, repeat=3),)), 5).train()
    counters = torch._dynamo.utils.counters
    counters.clear()
    # A batch that is not folded, and on a GPU: there, only the search for the real frames is no graph.
    compiled = torch.compile(network, dynamic=True, backend="eager")
    compiled(torch.randn(17, 64, 50), torch.arange(34, 51))[0].sum().backward()
    reasons = [reason for reason in counters["graph_break"] if "get_num_threads" not in reason]  # of a CPU's kernels
    assert all("nonzero" in reason for reason in reasons), reasons
    assert counters["stats"]["calls_captured"] > 30
