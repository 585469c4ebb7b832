"""What is made of checkpoints, and which are refused."""

import dataclasses
import io
import math
import os
import pickle
import re
import tarfile

import pytest
import torch
from carnelian_training import checkpoint
from carnelian_training.cli import main
from carnelian_training.foreign import sources, unpickling
from carnelian_training.loop.train import train
from carnelian_training.models.blocks import StackConfig
from carnelian_training.weight_files import CheckpointError

KERNEL, VARIANCE = (f"blocks.0.sub_blocks.0.{name}" for name in ("pointwise.weight", "norm.running_var"))


def test_a_published_checkpoint_is_half_the_size_and_describes_itself(tiny_config, tmp_path):
    train(tiny_config, tmp_path)
    checkpoint.publish(tmp_path / "tiny.pt", tmp_path / "to" / "published.pt")
    config, model = checkpoint.load_model(tmp_path / "to" / "published.pt")
    assert config == tiny_config
    _, content = checkpoint.load(tmp_path / "to" / "published.pt")
    assert {weight.dtype for weight in content["weights"].values() if weight.is_floating_point()} == {torch.float16}
    assert content["training"] is None
    assert content["results"]["dev_wer"] > 0
    _, exact = checkpoint.load_model(tmp_path / "tiny.pt")
    torch.testing.assert_close(model.head.weight, exact.head.weight, atol=1e-3, rtol=1e-3)


def test_a_network_that_is_not_known_is_refused(tiny_config):
    class TdnnConfig(StackConfig):
        name = "tdnn"

    config = dataclasses.replace(tiny_config, model=TdnnConfig(stages=tiny_config.model.stages))
    with pytest.raises(TypeError, match=r"must be a QuartzNetConfig, .* but is a TdnnConfig: give `build_model`"):
        checkpoint.build_model(config)


def test_an_average_is_the_mean_of_the_weights_and_statistics(tiny_config, tmp_path, call):
    models = [checkpoint.build_model(tiny_config).eval() for _ in range(3)]
    paths = [tmp_path / f"{i}.pt" for i in range(3)]
    for i, (model, path) in enumerate(zip(models, paths, strict=True)):
        model.blocks[0].sub_blocks[0].norm.running_var.fill_(1 + i)
        checkpoint.save(path, tiny_config, model.state_dict(), results={"step": i})
    assert call(main, "average", *paths, "--out", tmp_path / "mean.pt")[0] == 0
    config, mean = checkpoint.load_model(tmp_path / "mean.pt")
    assert config == tiny_config
    torch.testing.assert_close(mean.head.weight, sum(model.head.weight for model in models) / 3)
    assert mean.blocks[0].sub_blocks[0].norm.running_var.eq(2).all()
    assert checkpoint.load(tmp_path / "mean.pt")[1]["results"] == {"average_of": ["0.pt", "1.pt", "2.pt"]}
    checkpoint.average([paths[0], paths[0], paths[2]], tmp_path / "weighted.pt")
    _, mean = checkpoint.load_model(tmp_path / "weighted.pt")
    torch.testing.assert_close(mean.head.weight, (2 * models[0].head.weight + models[2].head.weight) / 3)


def test_an_average_of_different_networks_is_refused(tiny_config, tmp_path):
    german = dataclasses.replace(tiny_config, labels=(*tiny_config.labels, "ä"))
    for name, config in (("a", tiny_config), ("b", german)):
        checkpoint.save(tmp_path / f"{name}.pt", config, checkpoint.build_model(config).state_dict(), results={})
    paths = [tmp_path / "a.pt", tmp_path / "b.pt"]
    with pytest.raises(CheckpointError, match=r"a\.pt must be of the same network as .*b\.pt, but differs in labels$"):
        checkpoint.average(paths, tmp_path / "mean.pt")
    first, *rest = tiny_config.model.stages
    dilated = dataclasses.replace(tiny_config.model, stages=(dataclasses.replace(first, stride=1, dilation=2), *rest))
    undropped = dataclasses.replace(tiny_config.model, stages=(dataclasses.replace(first, dropout=0.5), *rest))
    weights = checkpoint.build_model(tiny_config).state_dict()
    for name, model in (("dilated", dilated), ("undropped", undropped)):
        config = dataclasses.replace(tiny_config, model=model)
        checkpoint.save(tmp_path / f"{name}.pt", config, weights, results={})
    with pytest.raises(CheckpointError, match=r"differs in model\.stages\.0\.dilation, model\.stages\.0\.stride"):
        checkpoint.average([tmp_path / "dilated.pt", paths[0]], tmp_path / "mean.pt")
    checkpoint.average([tmp_path / "undropped.pt", paths[0]], tmp_path / "mean.pt")
    checkpoint.save(tmp_path / "few.pt", tiny_config, dict(list(weights.items())[:1]), results={})
    with pytest.raises(CheckpointError, match=rf"differs in (\S+, ){{9}}\S+ and {len(weights) - 11} more$"):
        checkpoint.average([tmp_path / "few.pt", paths[0]], tmp_path / "mean.pt")
    with pytest.raises(CheckpointError, match="two checkpoints or more, found 1"):
        checkpoint.average(paths[:1], tmp_path / "mean.pt")
    with pytest.raises(CheckpointError, match=r"two files or more, but .*a\.pt is the only one"):
        checkpoint.average([paths[0], tmp_path / "." / "a.pt"], tmp_path / "mean.pt")


def test_a_checkpoint_of_others_is_refused(tmp_path):
    torch.save({"state_dict": {}}, tmp_path / "other.pt")
    with pytest.raises(CheckpointError, match=r"must be a checkpoint of Carnelian.*carnelian-train import"):
        checkpoint.load(tmp_path / "other.pt")


@pytest.mark.parametrize(
    "broken",
    [
        {"config": None},
        {"results": None},
        *({"weights": weights} for weights in (None, [], {"a": "b"}, {1: torch.zeros(1)})),
    ],
)
def test_a_checkpoint_without_its_parts_is_refused(broken, tiny_config, tmp_path):
    weights = checkpoint.build_model(tiny_config).state_dict()
    checkpoint.save(tmp_path / "tiny.pt", tiny_config, weights, results={})
    content = torch.load(tmp_path / "tiny.pt", weights_only=True)
    (name,) = broken
    for wrong in (content | broken, {key: value for key, value in content.items() if key != name}):
        torch.save(wrong, tmp_path / "tiny.pt")
        with pytest.raises(CheckpointError, match=rf"tiny\.pt must hold .*, but its `{name}` "):
            checkpoint.load(tmp_path / "tiny.pt")


def test_weights_that_do_not_fit_are_named(tiny_config, tmp_path):
    weights = checkpoint.build_model(tiny_config).state_dict()
    del weights["head.bias"]
    checkpoint.save(tmp_path / "tiny.pt", tiny_config, weights, results={})
    with pytest.raises(CheckpointError, match=r"head\.bias"):
        checkpoint.load_model(tmp_path / "tiny.pt")


def test_weights_of_other_types_become_those_of_the_network(tmp_path, tiny_config):
    model = checkpoint.build_model(tiny_config).eval()
    weights = model.state_dict()
    kinds = (torch.float16, torch.float64, torch.int64)
    changed = {name: tensor.round().to(kinds[i % 3]) for i, (name, tensor) in enumerate(weights.items())}
    checkpoint.save(tmp_path / "tiny.pt", tiny_config, changed, results={})
    _, loaded = checkpoint.load_model(tmp_path / "tiny.pt")
    for name, tensor in loaded.state_dict().items():
        torch.testing.assert_close(tensor, changed[name].to(weights[name].dtype))
    assert all(parameter.requires_grad for parameter in loaded.parameters())


@pytest.mark.parametrize(
    ("name", "change", "mistake"),
    [
        (VARIANCE, lambda found: -found, "holds variances, but some are negative"),
        (KERNEL, lambda found: torch.full_like(found, math.nan), "holds numbers that are not finite in float32"),
        (KERNEL, lambda found: found.double() + 1e300, "holds numbers that are not finite in float32"),
        *(
            (KERNEL, lambda found, kind=kind: found.to(getattr(torch, kind)), f"must hold .* or more, but holds {kind}")
            for kind in ("int8", "bool", "complex64", "float8_e4m3fn")
        ),
    ],
    ids=["negative", "nan", "too large", "int8", "bool", "complex64", "float8_e4m3fn"],
)
def test_numbers_that_no_network_has_are_refused_and_named(name, change, mistake, tiny_config, tmp_path):
    """As in checkpoints of other toolkits: they gave transcripts of nonsense."""
    weights = checkpoint.build_model(tiny_config).state_dict()
    checkpoint.save(tmp_path / "x.pt", tiny_config, weights | {name: change(weights[name])}, results={})
    with pytest.raises(CheckpointError, match=rf"(?s)x\.pt: 1 tensor\(s\) .*:\n  {re.escape(name)}: {mistake}$"):
        checkpoint.load(tmp_path / "x.pt")


@pytest.mark.filterwarnings("ignore:.*(TypedStorage|[Nn]ested|quantize).*")
@pytest.mark.parametrize(
    "change",
    [
        lambda found: found.to_sparse(),
        lambda found: torch.nested.nested_tensor([found.flatten(), found[0].flatten()]),
        lambda found: found.to("meta"),
        lambda found: torch.zeros(1).expand(found.shape),
        lambda found: torch.quantize_per_tensor(found, 0.1, 0, torch.qint8),
    ],
    ids=["sparse", "nested", "meta", "one number", "quantised"],
)
def test_tensors_that_are_not_dense_are_refused_and_named(change, tiny_config, tmp_path):
    """The message was PyTorch's, about its kernels, and named neither file nor tensor."""
    weights = checkpoint.build_model(tiny_config).state_dict()
    checkpoint.save(tmp_path / "x.pt", tiny_config, weights | {KERNEL: change(weights[KERNEL])}, results={})
    with pytest.raises(CheckpointError, match=rf"x\.pt must hold dense tensors .* '{re.escape(KERNEL)}' first$"):
        checkpoint.load(tmp_path / "x.pt")


@pytest.mark.parametrize("number", [torch.ones(3), torch.ones(1), 1.0, True, 2, None], ids=repr)
def test_a_format_that_is_not_1_is_refused(number, tiny_config, tmp_path):
    checkpoint.save(tmp_path / "x.pt", tiny_config, checkpoint.build_model(tiny_config).state_dict(), results={})
    torch.save(torch.load(tmp_path / "x.pt", weights_only=True) | {"format": number}, tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"x\.pt must be a checkpoint of Carnelian .*, but is not of format 1$"):
        checkpoint.load(tmp_path / "x.pt")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"repeat": 1000}, "must describe a network of 500 layers at most, but describes 1001"),
        ({"filters": 2**31 - 1, "kernel": 2**31 - 1, "separable": False}, "must describe a network of some gigabytes"),
        ({"filters": 10**7, "kernel": 1, "separable": False}, r"does not fit its own configuration.*head\.weight"),
    ],
    ids=["layers", "beyond 64 bits", "terabytes"],
)
def test_a_network_far_larger_than_its_weights_is_refused_before_it_is_built(change, message, tiny_config, tmp_path):
    weights = checkpoint.build_model(tiny_config).state_dict()
    checkpoint.save(tmp_path / "tiny.pt", tiny_config, weights, results={})
    content = torch.load(tmp_path / "tiny.pt", weights_only=True)
    content["config"]["model"]["stages"][1].update(change)
    torch.save(content, tmp_path / "tiny.pt")
    with pytest.raises(CheckpointError, match=rf"(?s)tiny\.pt {message}"):
        checkpoint.load_model(tmp_path / "tiny.pt")


def test_a_folder_need_not_be_utf8(tiny_config, tmp_path):
    """PyTorch's reader took its path for a file's own methods."""
    path = tmp_path / os.fsdecode(b"caf\xe9") / "tiny.pt"
    checkpoint.save(path, tiny_config, checkpoint.build_model(tiny_config).state_dict(), results={})
    assert checkpoint.load(path)[0] == tiny_config


def test_what_float16_cannot_hold_is_published_as_it_is(tiny_config, tmp_path):
    model = checkpoint.build_model(tiny_config)
    variance = model.blocks[0].sub_blocks[0].norm.running_var.fill_(1e5)
    checkpoint.save(tmp_path / "tiny.pt", tiny_config, model.state_dict(), results={})
    checkpoint.publish(tmp_path / "tiny.pt", tmp_path / "published.pt")
    _, published = checkpoint.load_model(tmp_path / "published.pt")
    assert torch.equal(published.blocks[0].sub_blocks[0].norm.running_var, variance)


def test_an_average_of_networks_that_hear_otherwise_is_refused(tiny_config, changed, tmp_path):
    weights = checkpoint.build_model(tiny_config).state_dict()
    other = changed(tiny_config, features={"edges": "zero"})
    for name, config in (("a", other), ("b", tiny_config)):
        checkpoint.save(tmp_path / f"{name}.pt", config, weights, results={})
    with pytest.raises(CheckpointError, match=r"a\.pt must be of the same network as .*b\.pt, .* in features$"):
        checkpoint.average([tmp_path / "a.pt", tmp_path / "b.pt"], tmp_path / "mean.pt")
    assert not (tmp_path / "mean.pt").exists()


class Unknown:
    """A class that no reader of checkpoints knows."""


@pytest.mark.parametrize("read", [checkpoint.load, sources.load_model])
@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (lambda path: path.write_text("nonsense"), "it is no file of PyTorch's"),
        (lambda path: path.write_text(""), "it is no file of PyTorch's"),
        (lambda path: path.write_text("{}"), "it is no file of PyTorch's"),
        (lambda path: path.write_bytes(bytes(1024)), "it is no file of PyTorch's"),
        (
            lambda path: torch.save({"weights": {}, "x": Unknown()}, path),
            r"Unsupported global: GLOBAL \S*Unknown was not an allowed global by default",
        ),
        (
            lambda path: torch.save({"weights": {}, "x": os.system}, path),
            r"it holds code \(posix\.system\), which is never run",
        ),
    ],
)
def test_what_cannot_be_read_is_said_without_the_advice_to_run_it(write, reason, read, tmp_path):
    write(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=rf"x\.pt cannot be read as a checkpoint of Carnelian .*: {reason}$"):
        read(tmp_path / "x.pt")


def test_a_tar_archive_is_named(tmp_path):
    with tarfile.open(tmp_path / "x.pt", "w") as archive:
        archive.addfile(tarfile.TarInfo("model_config.yaml"))
    with pytest.raises(CheckpointError, match=r"cannot be .*: it is a tar archive, as \.nemo files are$"):
        checkpoint.load(tmp_path / "x.pt")


@pytest.mark.parametrize("first", ["storages", "\udc80"], ids=["as PyTorch wrote it", "that starts as a pickle does"])
def test_a_tar_archive_is_not_unpacked(first, tmp_path):
    """PyTorch unpacked it to disk, whatever its size, and opened what was there: a pipe held it for ever."""
    zero, empty, content = (pickle.dumps(value, protocol=2) for value in (0, [], {"state_dict": {}}))
    with tarfile.open(tmp_path / "x.pt", "w", format=tarfile.USTAR_FORMAT) as archive:
        for name, data in {first: b"", "storages": zero + empty, "tensors": zero, "pickle": content}.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            archive.addfile(member, io.BytesIO(data))
    with pytest.raises(CheckpointError, match=r"cannot be .*: it is a tar archive, as \.nemo files are$"):
        unpickling.load_checkpoint(tmp_path / "x.pt")


def test_a_folder_is_no_checkpoint_of_ours(tmp_path):
    """`init.checkpoint` said: [Errno 21] Is a directory."""
    with pytest.raises(CheckpointError, match=r"\(`carnelian-train import` makes one .*\), but is a folder$"):
        checkpoint.load(tmp_path)


def test_a_checkpoint_that_is_not_there_is_no_foreign_one(tmp_path):
    with pytest.raises(CheckpointError, match=r"absent\.pt must be a checkpoint, but there is no such file$"):
        checkpoint.load(tmp_path / "absent.pt")
