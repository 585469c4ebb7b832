import copy

import pytest
import torch
from carnelian_training.checkpoint import build_model
from carnelian_training.distributed import Process
from carnelian_training.loop.muon import Muon, orthogonal
from carnelian_training.loop.optim import NovoGrad, build_optimizer, clip_gradients, learning_rate
from torch import nn

CPU = Process(torch.device("cpu"))


@pytest.fixture
def rates(tiny_config, changed):
    """Returns the rates of some steps of 130."""

    def rates(*steps, **settings):
        settings = {"lr": 0.1, "min_lr": 0.01, "warmup_steps": 10} | settings
        config = changed(tiny_config, optimizer=settings, loop={"steps": 130})
        return [learning_rate(config, step) for step in steps]

    return rates


def test_learning_rate_warms_up_holds_and_decays(rates):
    found = rates(0, 9, 10, 29, 30, 80, 129, 130, 500, hold_steps=20)
    assert found == pytest.approx([0.01, 0.1, 0.1, 0.1, 0.1, 0.055, 0.01, 0.01, 0.01], abs=1e-4)


def test_the_exponential_schedule_is_nvidias(rates):
    settings = {"hold_steps": 20, "schedule": "exponential", "decay": 0.981, "decay_steps": 7}
    found = rates(9, 30, 37, 44, 100_000, **settings)
    assert found == pytest.approx([0.1, 0.1, 0.1 * 0.981, 0.1 * 0.981**2, 0.01])


def test_linear_falls_to_the_end(rates):
    found = rates(9, 10, 70, 130, 500, schedule="linear", min_lr=0.0)
    assert found == pytest.approx([0.1, 0.1, 0.05, 0.0, 0.0])


def test_tri_stage_is_fairseqs(rates):
    settings = {"hold_steps": 20, "schedule": "tri_stage", "start_share": 0.01}
    found = rates(0, 4, 9, 29, 30, 80, 130, 500, **settings)
    expected = [0.0109, 0.0505, 0.1, 0.1, 0.1, 0.1 * 0.05**0.5, 0.005, 0.005]
    assert found == pytest.approx(expected)


def test_another_batch_scales_the_rate_by_the_square_root(rates, tiny_config):
    assert rates(50, lr_batch_s=tiny_config.data.batch_s / 4, hold_steps=100) == pytest.approx([0.2])


@pytest.mark.parametrize("schedule", ["cosine", "linear", "exponential"])
def test_the_rate_of_a_small_batch_falls_as_that_of_a_large_one_does(rates, tiny_config, schedule):
    small = rates(10, 70, 130, lr_batch_s=tiny_config.data.batch_s * 400, schedule=schedule)
    large = rates(10, 70, 130, schedule=schedule)
    assert small == pytest.approx([rate / 20 for rate in large])


@pytest.mark.parametrize("eps", [0.0, 0.5])
def test_novograd_follows_the_papers_algorithm(eps):
    parameter = nn.Parameter(torch.tensor([3.0, -4.0]))
    optimizer = NovoGrad([parameter], lr=0.1, betas=(0.9, 0.25), weight_decay=0.5, eps=eps)
    expected, momentum, second = parameter.detach().clone(), torch.zeros(2), None
    for gradient in (torch.tensor([1.0, 2.0]), torch.tensor([-2.0, 0.5])):
        parameter.grad = gradient.clone()
        optimizer.step()
        squared = gradient.square().sum()
        second = squared if second is None else 0.25 * second + 0.75 * squared
        momentum = 0.9 * momentum + gradient / (second.sqrt() + eps) + 0.5 * expected
        expected = expected - 0.1 * momentum
        torch.testing.assert_close(parameter.detach(), expected)


def test_novograd_leaves_a_parameter_without_a_gradient_where_it_is():
    parameter = nn.Parameter(torch.tensor([3.0, -4.0]))
    parameter.grad = torch.zeros(2)
    NovoGrad([parameter], lr=0.1, betas=(0.9, 0.25), weight_decay=0.0).step()
    assert parameter.tolist() == [3.0, -4.0]


class PerTensorNovoGrad(NovoGrad):
    """The same, one tensor after the other."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state, gradient = self.state[parameter], parameter.grad
                squared_norm = gradient.square().sum()
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                    state["second_moment"] = squared_norm
                else:
                    state["second_moment"] = torch.lerp(squared_norm, state["second_moment"], beta2)
                direction = gradient / (state["second_moment"].sqrt() + group["eps"])
                direction = direction.add(parameter, alpha=group["weight_decay"])
                state["momentum"].mul_(beta1).add_(direction)
                parameter.add_(state["momentum"], alpha=-group["lr"])


@pytest.mark.parametrize("beta2", [0.0, 0.98])
def test_all_tensors_at_once_equal_one_after_the_other(tiny_config, beta2):
    networks = []
    for kind in (NovoGrad, PerTensorNovoGrad):
        torch.manual_seed(2)
        networks.append(build_model(tiny_config))
        optimizer = kind(networks[-1].parameters(), lr=0.01, betas=(0.95, beta2), weight_decay=1e-3)
        for _ in range(4):
            for parameter in networks[-1].parameters():
                parameter.grad = torch.randn_like(parameter)
            networks[-1].head.bias.grad = None  # a frozen one
            optimizer.step()
    for together, apart in zip(*(network.parameters() for network in networks), strict=True):
        torch.testing.assert_close(together, apart, atol=1e-6, rtol=1e-5)


def test_names_that_no_loader_checked_are_refused(rates, tiny_config, changed):
    with pytest.raises(ValueError, match=r"`optimizer\.schedule` must be cosine, .* but is cosin"):
        rates(50, schedule="cosin")
    config = changed(tiny_config, optimizer={"name": "sgd", "betas": (0.9, 0.98)})
    with pytest.raises(ValueError, match=r"`optimizer\.name` must be adamw, muon or novograd, but is sgd"):
        build_optimizer(config, build_model(config), CPU)


@pytest.mark.parametrize("name", ["adamw", "muon", "novograd"])
def test_every_optimizer_has_its_eps(tiny_config, changed, name):
    config = changed(tiny_config, optimizer={"name": name, "eps": 0.5})
    assert {group["eps"] for group in build_optimizer(config, build_model(config), CPU).param_groups} == {0.5}


def test_adamw_does_not_decay_norms_and_biases(tiny_config, changed):
    config = changed(tiny_config, optimizer={"weight_decay": 0.3})
    model = build_model(config)
    decayed, plain = build_optimizer(config, model, CPU).param_groups
    assert {p.ndim for p in decayed["params"]} == {4}
    assert decayed["weight_decay"] == 0.3
    assert {p.ndim for p in plain["params"]} == {1}
    assert plain["weight_decay"] == 0.0
    assert len(decayed["params"]) + len(plain["params"]) == len(list(model.parameters()))


def test_novograd_decays_norms_and_biases_too(tiny_config, changed):
    config = changed(tiny_config, optimizer={"name": "novograd", "weight_decay": 0.3})
    model = build_model(config)
    (decayed,) = build_optimizer(config, model, CPU).param_groups
    assert decayed["weight_decay"] == 0.3
    assert len(decayed["params"]) == len(list(model.parameters()))


@pytest.fixture
def muon_config(tiny_config, changed):
    return changed(tiny_config, optimizer={"name": "muon", "lr": 0.01, "weight_decay": 0.1})


def take_steps(optimizer, parameters, seed, num_steps=3):
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize("shape", [(6, 10, 1, 1), (12, 5, 1, 3), (8, 8)])
def test_muon_is_pytorchs_for_the_matrix_of_a_weight(shape):
    ours = nn.Parameter(
        torch.randn(shape).contiguous(memory_format=torch.channels_last if len(shape) == 4 else torch.contiguous_format)
    )
    theirs = nn.Parameter(ours.detach().flatten(1).clone())
    optimizer = Muon(
        [{"params": [ours], "orthogonal": True, "weight_decay": 0.1}],
        lr=0.02,
        betas=(0.9, 0.98),
        eps=1e-8,
        dtype=torch.bfloat16,
        process=CPU,
    )
    take_steps(optimizer, [ours], seed=1)
    reference = torch.optim.Muon([theirs], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    generator = torch.Generator().manual_seed(1)
    for _ in range(3):
        theirs.grad = torch.randn(shape, generator=generator).flatten(1)
        reference.step()
    torch.testing.assert_close(ours.detach().flatten(1), theirs.detach(), atol=1e-5, rtol=1e-5)


def test_muon_moves_the_head_depthwise_weights_norms_and_biases_as_adamw_does(muon_config, changed):
    torch.manual_seed(2)
    model = build_model(muon_config)
    twin = copy.deepcopy(model)
    optimizer = build_optimizer(muon_config, model, CPU)
    others = changed(muon_config, optimizer={"name": "adamw"})
    take_steps(optimizer, list(model.parameters()), seed=3)
    take_steps(build_optimizer(others, twin, CPU), list(twin.parameters()), seed=3)
    moved = {
        name
        for (name, mine), adamws in zip(model.named_parameters(), twin.parameters(), strict=True)
        if not torch.allclose(mine, adamws, atol=1e-6, rtol=1e-5)
    }
    pointwise = {name for name, weight in model.named_parameters() if weight.ndim == 4 and weight.shape[1] > 1}
    assert moved == pointwise - {"head.weight"} != set()
    matrices = [group for group in optimizer.param_groups if group["orthogonal"]]
    assert {group["weight_decay"] for group in matrices} == {0.1}


def test_muon_goes_on_from_its_state(muon_config):
    torch.manual_seed(2)
    model = build_model(muon_config)
    optimizer = build_optimizer(muon_config, model, CPU)
    take_steps(optimizer, list(model.parameters()), seed=3)
    twin = copy.deepcopy(model)
    resumed = build_optimizer(muon_config, twin, CPU)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for network, its in ((model, optimizer), (twin, resumed)):
        take_steps(its, list(network.parameters()), seed=4)
    for whole, parts in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(whole, parts)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("fp32", torch.float32), ("fp16", torch.float32), ("bf16", torch.bfloat16)]
)
def test_muon_computes_in_the_precision_of_training(muon_config, changed, monkeypatch, precision, dtype):
    seen = set()
    monkeypatch.setattr(
        "carnelian_training.loop.muon.orthogonal", lambda matrix: seen.add(matrix.dtype) or orthogonal(matrix)
    )
    config = changed(muon_config, loop={"precision": precision})
    model = build_model(config)
    take_steps(build_optimizer(config, model, CPU), list(model.parameters()), seed=3)
    assert seen == {dtype}


def test_processes_share_muons_matrices(muon_config, changed, monkeypatch):
    class OneOfTwo(Process):
        def total(self, values):
            return values

    shares = []
    monkeypatch.setattr("carnelian_training.loop.muon.orthogonal", lambda matrix: shares[-1].append(matrix) or matrix)
    config = changed(muon_config, init={"stage_lr_decay": 0.5})
    for rank in range(2):
        shares.append([])
        model = build_model(config)
        take_steps(build_optimizer(config, model, OneOfTwo(CPU.device, rank, 2)), list(model.parameters()), 3, 1)
    # The pointwise weights of a stem of one sub-block, and of a block of two with a projection.
    assert sorted(map(len, shares)) == [2, 2]


@pytest.mark.parametrize("shape", [(64, 256), (256, 64)])
def test_an_orthogonal_update_has_equal_singular_values(shape):
    values = torch.linalg.svdvals(orthogonal(torch.randn(shape, generator=torch.Generator().manual_seed(5))))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_gradients_are_corrected_before_they_are_clipped():
    for max_norm, left in ((None, [6.0, 8.0]), (5.0, [3.0, 4.0]), (20.0, [6.0, 8.0])):
        layer = nn.Linear(2, 1, bias=False)
        layer.weight.grad = torch.tensor([[3.0, 4.0]])
        assert clip_gradients(layer, max_norm, 2.0).item() == pytest.approx(10.0)
        torch.testing.assert_close(layer.weight.grad, torch.tensor([left]), atol=1e-4, rtol=0)
