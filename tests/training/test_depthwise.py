import os
import subprocess
import sys

import pytest
import torch
from carnelian_training.models.dropout import dropout
from carnelian_training.models.masked import MaskedConv
from torch.nn import functional as F


@pytest.mark.parametrize(
    ("kernel", "stride", "dilation", "frames"),
    [(11, 1, 1, 40), (11, 2, 1, 41), (11, 2, 1, 40), (33, 1, 1, 7), (5, 1, 2, 21), (1, 1, 1, 3), (3, 1, 1, 1)],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_training_on_a_cpu_gives_the_gradients_of_a_plain_convolution(kernel, stride, dilation, frames, threads):
    torch.manual_seed(0)
    conv = MaskedConv(8, 8, kernel, stride=stride, dilation=dilation, groups=8).train()
    x = torch.randn(3, 8, 1, frames).to(memory_format=torch.channels_last).requires_grad_()
    padding = dilation * (kernel // 2)
    expected = F.conv1d(x.squeeze(2), conv.weight.squeeze(2), None, stride, padding, dilation, 8).unsqueeze(2)
    upstream = torch.randn_like(expected)
    expected_grads = torch.autograd.grad(expected, (x, conv.weight), upstream)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        result = conv(x)
        grads = torch.autograd.grad(result, (x, conv.weight), upstream)
    finally:
        torch.set_num_threads(before)
    torch.testing.assert_close(result, expected)
    for grad, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, reference, rtol=1e-5, atol=1e-5)


def test_autocast_leaves_results_and_gradients_in_float32():
    torch.manual_seed(0)
    conv = MaskedConv(16, 16, 9, groups=16).train()
    x = torch.randn(2, 16, 1, 50).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    expected = F.conv2d(x.float(), conv.weight, None, 1, (0, 4), 1, 16)
    expected_grads = torch.autograd.grad(expected.square().sum(), (x, conv.weight))
    with torch.autocast("cpu", torch.bfloat16):
        result = conv(x)
        loss = result.square().sum()
    grads = torch.autograd.grad(loss, (x, conv.weight))
    torch.testing.assert_close(result, expected)
    for grad, reference in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, reference)


def test_a_training_step_keeps_an_activation_in_its_own_type():
    """A copy in float32 was kept beside it: 110 MB of the 1350 MB of a step of QuartzNet 15x5 in bfloat16."""
    conv = MaskedConv(16, 16, 9, groups=16).train()
    x = torch.randn(2, 16, 1, 50).bfloat16().to(memory_format=torch.channels_last).requires_grad_()
    kept = []
    with (
        torch.autocast("cpu", torch.bfloat16),
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor.data_ptr()) or tensor, lambda t: t),
    ):
        conv(x)
    assert set(kept) == {x.data_ptr(), conv.weight.data_ptr()}


def test_dropout_happens_with_its_probability_and_keeps_the_mean():
    torch.manual_seed(0)
    x = torch.ones(5, 64, 1, 333).to(memory_format=torch.channels_last).requires_grad_()
    result = dropout(x, 0.3, True)
    assert (result == 0).float().mean().item() == pytest.approx(0.3, abs=0.01)
    assert result.mean().item() == pytest.approx(1.0, abs=0.01)
    assert result.unique().tolist() == pytest.approx([0.0, 1 / 0.7], abs=1e-4)
    (grad,) = torch.autograd.grad(result.sum(), x)
    torch.testing.assert_close(grad, result)
    assert dropout(x, 0.3, False) is x
    assert dropout(x, 1 - 1e-16, True).isfinite().all()


@pytest.mark.parametrize("home", ["/proc/none", "~"])
def test_code_that_no_folder_can_keep_is_compiled_each_time(tmp_path, home):
    """A home that cannot be written, and what `~` stays where HOME is not set and the user is unknown."""
    environment = os.environ | {"HOME": home, "NUMBA_CACHE_LOCATOR_CLASSES": "UserWideCacheLocator"}
    environment.pop("XDG_CACHE_HOME", None)
    program = "from carnelian_training.models.depthwise import _correlate; print(_correlate.stats.cache_path)"
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert (found.stdout, found.stderr) == ("None\n", "")
    assert not list(tmp_path.iterdir())
