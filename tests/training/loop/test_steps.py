"""Single steps of the optimiser, without a run around them."""

import dataclasses
import shutil
from itertools import islice

import pytest
import torch
from carnelian_training.config import config_from_dict
from carnelian_training.config_tree import config_to_dict
from carnelian_training.data.manifest import read_manifest
from carnelian_training.distributed import Process
from carnelian_training.loop.ema import Average
from carnelian_training.loop.recognition import shares
from carnelian_training.loop.state import new_state
from carnelian_training.loop.train import optimise
from carnelian_training.models.blocks import Block
from carnelian_training.models.masked import Mask, MaskedBatchNorm
from carnelian_training.models.shared_norm import shared_batch_norm
from torch.nn import functional as F

CPU = Process(torch.device("cpu"))


def steps(config, count, state=None):
    """Outcomes of the first steps, and the state after them."""
    state = state or new_state(config, CPU)
    outcomes = []
    for share in islice(shares(read_manifest(config.data.dev), config, state), count):
        outcomes.append(optimise(state, share, config))
        state.step += 1
    return outcomes, state


@pytest.fixture(scope="module")
def plain(tiny_config):
    """Three steps in float32."""
    return steps(tiny_config, 3)


def test_parts_of_a_step_add_up_to_it(without_dropout, changed):
    whole = changed(without_dropout, loop={"batch_statistics": "frozen"}, augment={"speed_probability": 0.0})
    first, one = steps(whole, 3)
    second, many = steps(changed(whole, data={"device_batch_s": 4.0}), 3)
    assert [o.loss for o in first] == pytest.approx([o.loss for o in second], abs=1e-5)
    assert [o.grad_norm for o in first] == pytest.approx([o.grad_norm for o in second], rel=1e-4)
    torch.testing.assert_close(one.model.head.weight, many.model.head.weight, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("precision", ["tf32", "bf16", "fp16"])
def test_precisions_agree_roughly(tiny_config, plain, changed, precision):
    found, state = steps(changed(tiny_config, loop={"precision": precision}), 3)
    assert [o.loss for o in found] == pytest.approx([o.loss for o in plain[0]], rel=0.02)
    assert state.model.head.weight.dtype == torch.float32
    assert state.scaler.is_enabled() == (precision == "fp16")


@pytest.mark.parametrize(
    ("capability", "precision", "warned"), [("AVX2", "bf16", True), ("AVX2", "fp32", False), ("AVX512", "bf16", False)]
)
def test_emulated_bf16_is_warned_of(tiny_config, changed, monkeypatch, caplog, capability, precision, warned):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)
    new_state(changed(tiny_config, loop={"precision": precision}), CPU)
    assert ("set `loop.precision=fp32`" in caplog.text) == warned


def test_fp16_survives_an_overflow_by_scaling_down(tiny_config, changed):
    config = changed(tiny_config, loop={"precision": "fp16"})
    state = new_state(config, CPU)
    state.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**60, backoff_factor=2.0**-50)
    before = state.model.head.weight.clone()
    outcomes, _ = steps(config, 1, state)
    assert not outcomes[0].is_finite
    assert torch.equal(before, state.model.head.weight)
    assert state.scaler.get_scale() == 2.0**10
    outcomes, _ = steps(config, 1, state)
    assert outcomes[0].is_finite
    assert (state.skipped_steps, state.skipped_in_a_row) == (1, 0)


def poison(state):
    """Make the next loss NaN."""
    with torch.no_grad():
        state.model.head.bias[0] = torch.nan


def test_a_step_that_is_not_finite_changes_nothing_and_names_its_clips(tiny_config, changed, caplog):
    config = changed(tiny_config, optimizer={"ema": 0.9})
    _, state = steps(config, 1)
    poison(state)
    before = {name: tensor.clone() for name, tensor in state.model.state_dict().items()}
    average = state.average.model.head.weight.clone()
    outcomes, _ = steps(config, 1, state)
    assert not outcomes[0].is_finite
    for name, tensor in state.model.state_dict().items():
        torch.testing.assert_close(tensor, before[name], rtol=0, atol=0, equal_nan=True)
    assert torch.equal(state.average.model.head.weight, average)
    assert state.skipped_steps == 1
    assert "step 2 skipped: loss nan" in caplog.text
    assert "demo/clips/" in caplog.text


def test_too_many_skipped_steps_in_a_row_end_the_run(tiny_config, changed):
    config = changed(tiny_config, loop={"max_skipped_steps": 1})
    state = new_state(config, CPU)
    poison(state)
    with pytest.raises(RuntimeError, match=r"in 2 steps in a row .*`optimizer\.lr`"):
        steps(config, 3, state)


def test_the_average_follows_weights_and_statistics(tiny_config, changed):
    _, state = steps(changed(tiny_config, optimizer={"ema": 0.999}), 1)
    start = new_state(tiny_config, CPU).model.state_dict()
    for name, average in state.average.model.state_dict().items():
        if average.is_floating_point():  # after the first step the ramp says 0.1, not 0.999
            expected = start[name].lerp(state.model.state_dict()[name], 0.9)
            torch.testing.assert_close(average, expected, atol=1e-6, rtol=1e-5)
    assert state.best_model is state.average.model


@pytest.mark.parametrize("network", ["quartznet", "jasper"])
def test_recomputing_activations_changes_nothing_but_memory(tiny_config, changed, network):
    tree = config_to_dict(tiny_config)
    if network == "jasper":  # dense: each residual block adds what all of them before it were given
        tree["model"]["stages"][1] |= {"blocks": 3, "separable": False}
        tree["model"] |= {"name": "jasper"}
    config = config_from_dict(tree, "here")
    (kept, model), (recomputed, other) = (
        (outcomes, state.model)
        for outcomes, state in (steps(changed(config, loop={"recompute": recompute}), 2) for recompute in (False, True))
    )
    assert all(block.recompute for block in other.modules() if isinstance(block, Block))
    assert recomputed == kept  # losses and gradient norms, to the bit
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name]), name


def test_without_a_compiler_compile_is_refused(tiny_config, changed, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(RuntimeError, match=r"`loop\.compile` needs a C\+\+ compiler"):
        steps(changed(tiny_config, loop={"compile": True}), 1)


def test_shared_statistics_of_one_process_are_pytorchs():
    torch.manual_seed(0)
    rows = (5 + 2 * torch.randn(50, 7)).requires_grad_()
    weight, bias = torch.randn(7).requires_grad_(), torch.randn(7).requires_grad_()
    results = []
    for shared in (False, True):
        mean, variance = torch.zeros(7), torch.ones(7)
        if shared:
            out = shared_batch_norm(rows, weight, bias, mean, variance, 0.1, 1e-3)
        else:
            out = F.batch_norm(rows, mean, variance, weight, bias, True, 0.1, 1e-3)
        gradients = torch.autograd.grad((out.sin() * torch.arange(7)).sum(), (rows, weight, bias))
        results.append((out, mean, variance, *gradients))
    for ours, pytorchs in zip(*results, strict=True):
        torch.testing.assert_close(ours, pytorchs, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("shared", [False, True])
def test_a_process_without_clips_leaves_statistics_alone(shared):
    norm = MaskedBatchNorm(3)
    norm.shared = shared
    out = norm(torch.ones(1, 3, 1, 4, requires_grad=True), Mask.from_lengths(torch.tensor([0]), 4))
    out.sum().backward()
    assert not out.any()
    assert not norm.running_mean.any()
    assert (norm.running_var == 1).all()
    assert not norm.weight.grad.any()


def test_clips_that_are_left_out_leave_the_step_of_the_others_as_it_is(without_dropout, changed, bad_clips):
    config = changed(without_dropout, data={"batch_s": 100}, optimizer={"max_grad_norm": 1.0})
    good = read_manifest(config.data.dev)
    outcomes, gradients = [], []
    for clips in (good, [*good, bad_clips["text"], bad_clips["silent"]]):
        state = new_state(config, CPU)
        outcomes.append(optimise(state, next(iter(shares(clips, config, state))), config))
        gradients.append(torch.cat([p.grad.flatten() for p in state.model.parameters()]))
    assert state.skipped_clips == 2
    assert outcomes[1].loss == pytest.approx(outcomes[0].loss, rel=1e-4)
    assert outcomes[1].grad_norm == pytest.approx(outcomes[0].grad_norm, rel=1e-3)
    torch.testing.assert_close(gradients[1], gradients[0], atol=1e-4, rtol=1e-2)


def test_skipped_steps_that_are_not_in_a_row_end_no_run(tiny_config, changed):
    config = changed(tiny_config, loop={"max_skipped_steps": 1})
    state = new_state(config, CPU)
    found = []
    for _ in range(3):
        poison(state)
        found += steps(config, 1, state)[0]
        with torch.no_grad():
            state.model.head.bias[0] = 0.0
        found += steps(config, 1, state)[0]
    assert [outcome.is_finite for outcome in found] == [False, True] * 3
    assert (state.skipped_steps, state.skipped_in_a_row) == (3, 0)


def test_dropout_differs_by_seed_step_and_process(tiny_config, changed):
    share = next(iter(shares(read_manifest(tiny_config.data.dev), tiny_config, new_state(tiny_config, CPU))))
    batches = list(share.batches)

    def loss(seed=1, step=0, rank=0):
        state = new_state(tiny_config, CPU)
        state.step, state.process = step, Process(CPU.device, rank)
        seeded = changed(tiny_config, loop={"seed": seed})
        return optimise(state, dataclasses.replace(share, batches=iter(batches)), seeded).loss

    first = loss()
    assert loss() == first
    assert len({first, loss(seed=2), loss(step=1), loss(rank=1)}) == 4


def test_statistics_move_by_the_mean_over_the_processes_with_clips(tiny_config):
    class Several(Process):
        def total(self, values):
            return values.mul_(3)  # two more are as this one, and one has not moved

    for with_clips, share in ((3, 1.0), (4, 0.75)):
        state = new_state(tiny_config, Several(CPU.device, size=4))
        norms = [module for module in state.model.modules() if isinstance(module, MaskedBatchNorm)]
        for norm in norms:
            norm.running_mean += 8
        state.took_step(tiny_config, with_clips)
        assert all((norm.running_mean == 8 * share).all() and (norm.running_var == 1).all() for norm in norms)


def test_the_average_moves_by_its_decay_once_the_start_is_over():
    model = torch.nn.Linear(1, 1)
    average = Average(model, 0.9)
    with torch.no_grad():
        model.weight += 1
    average.update(100_000)
    torch.testing.assert_close(model.weight - average.model.weight, torch.full((1, 1), 0.9))
