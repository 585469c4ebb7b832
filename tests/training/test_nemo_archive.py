"""`.nemo` files as archives."""

import bz2
import functools
import gzip
import io
import lzma
import os
import subprocess
import tarfile
import tracemalloc
import zipfile
from pathlib import Path

import pytest
import torch
from carnelian_training.foreign import nemo_archive, sources
from carnelian_training.weight_files import CheckpointError

REFERENCES = Path(__file__).parent / "references"
HUGE = 1 << 24


def pack(path: Path, contents: dict[str, bytes], **options) -> None:
    with tarfile.open(path, "w:gz", **options) as archive:
        for name, content in contents.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))


def test_a_file_that_shows_no_compression_is_not_decompressed(tmp_path, monkeypatch):
    """`tarfile` tries each, and LZMA's reader took a minute for a GB of zeros."""
    for name in ("gzopen", "bz2open", "xzopen"):
        monkeypatch.setattr(tarfile.TarFile, name, None)
    (tmp_path / "x.pt").write_bytes(bytes(4096))
    assert not nemo_archive.is_archive(tmp_path / "x.pt")
    with pytest.raises(CheckpointError, match=r"must hold model_config\.yaml at its root"):
        nemo_archive.read(tmp_path / "x.pt")


def members(path: Path) -> dict[str, bytes]:
    with tarfile.open(path) as archive:
        return {Path(member.name).name: archive.extractfile(member).read() for member in archive if member.isfile()}


@pytest.mark.parametrize("compress", [functools.partial(gzip.compress, mtime=0), bz2.compress, lzma.compress])
def test_a_damaged_archive_is_named(tmp_path, compress):
    path = tmp_path / "x.nemo"
    whole = compress((REFERENCES / "jasper.nemo").read_bytes())
    for start in range(100, len(whole) // 3, 500):
        path.write_bytes(whole[:start] + bytes([255] * 100) + whole[start + 100 :])
        with pytest.raises(CheckpointError, match=r"x\.nemo"):
            sources.read(path)


def test_nested_aliases_that_stand_for_billions_of_nodes_are_refused(tmp_path):
    lines = ["labels0: &a0 [x]"]
    lines += [f"labels{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 10)]
    path = tmp_path / "x.nemo"
    weights = io.BytesIO()
    torch.save({}, weights)
    pack(path, {nemo_archive.CONFIG_FILE: "\n".join(lines).encode(), nemo_archive.WEIGHTS_FILE: weights.getvalue()})
    with pytest.raises(
        CheckpointError, match=r"x\.nemo cannot be read: aliases .* must stand for at most 100,000 nodes"
    ):
        sources.read(path)


@pytest.mark.parametrize("configuration", [b"[]", b"model: quartznet"])
def test_a_configuration_that_is_no_mapping_is_refused(tmp_path, configuration):
    weights = io.BytesIO()
    torch.save({}, weights)
    contents = {nemo_archive.CONFIG_FILE: configuration, nemo_archive.WEIGHTS_FILE: weights.getvalue()}
    pack(tmp_path / "x.nemo", contents)
    with pytest.raises(CheckpointError, match=r"x\.nemo: .* must hold mappings, but do not"):
        sources.read(tmp_path / "x.nemo")


def zipped(content: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", content)
    return packed.getvalue()


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        ({nemo_archive.WEIGHTS_FILE: bytes(HUGE)}, "must hold at most 20 times its size"),
        ({nemo_archive.CONFIG_FILE: bytes(HUGE)}, "must hold at most 20 times its size"),
        ({"tokenizer.model": bytes(HUGE)}, "must hold at most 20 times its size"),
        (
            {nemo_archive.CONFIG_FILE: b"{}", nemo_archive.WEIGHTS_FILE: zipped(bytes(HUGE))},
            "must hold at most 20 times its size",
        ),
        ({"x" * HUGE: b""}, "must be a whole tar archive"),
        ({nemo_archive.WEIGHTS_FILE: bytes(1000)}, "must be a file of PyTorch's"),
    ],
    ids=["weights", "configuration", "other", "in the weights", "name", "zeros"],
)
def test_zeros_by_the_megabyte_are_refused_before_they_are_read(tmp_path, contents, message):
    path = tmp_path / "x.nemo"
    pack(path, contents)
    tracemalloc.start()
    with pytest.raises(CheckpointError, match=rf"x\.nemo.* {message}"):
        nemo_archive.read(path)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < HUGE / 4


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"no tar", "must be a whole tar archive.* not: [a-z ]+$"), (None, "must hold model_config")],
)
def test_other_files_are_refused(tmp_path, content, message):
    path = tmp_path / "x.nemo"
    if content is None:
        tarfile.open(path, "w").close()
    else:
        path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        sources.read(path)


@pytest.mark.parametrize("target", ["/etc/passwd", nemo_archive.CONFIG_FILE], ids=["out of the archive", "itself"])
def test_a_link_is_refused_by_name(tmp_path, target):
    """It ended in a KeyError, or in a RecursionError if it led to itself."""
    path = tmp_path / "x.nemo"
    link = tarfile.TarInfo(nemo_archive.CONFIG_FILE)
    link.type, link.linkname = tarfile.SYMTYPE, target
    with tarfile.open(path, "w") as archive:
        archive.addfile(link)
    with pytest.raises(CheckpointError, match=r"x\.nemo: model_config\.yaml must be a regular file, but is a link"):
        sources.read(path)


def test_only_the_files_at_the_root_count(tmp_path):
    """A copy in a folder took the place of the model's own weights."""
    path, parts = tmp_path / "x.nemo", members(REFERENCES / "quartznet.nemo")
    others = members(REFERENCES / "jasper.nemo")
    pack(path, {f"./{name}": parts[name] for name in parts} | {f"./before/{name}": others[name] for name in others})
    expected, weights = sources.read(REFERENCES / "quartznet.nemo", "same")
    config, found = sources.read(path, "same")
    assert config == expected
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())
    pack(path, {f"model/{name}": content for name, content in parts.items()})
    with pytest.raises(CheckpointError, match=r"x\.nemo must hold model_config\.yaml at its root, but does not"):
        sources.read(path)
    pack(path, parts | {f"./{nemo_archive.WEIGHTS_FILE}": others[nemo_archive.WEIGHTS_FILE]})
    with pytest.raises(CheckpointError, match=r"x\.nemo must hold model_weights\.ckpt once, but holds it twice"):
        sources.read(path)


@pytest.mark.parametrize("name", ["X.NEMO", "x.tar.gz", "x.pt", "x"])
def test_an_archive_is_read_under_another_name(name, tmp_path):
    pack(tmp_path / name, members(REFERENCES / "quartznet.nemo"))
    expected, _ = sources.read(REFERENCES / "quartznet.nemo", "same")
    assert sources.load_model(tmp_path / name, "same")[0] == expected


@pytest.mark.parametrize("name", ["quartznet.zip", "quartznet.nemo"])
def test_what_is_no_file_of_weights_is_named(name, tmp_path):
    path = tmp_path / name
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("JasperEncoder-STEP-1.pt", b"")
    for load in (sources.read, sources.load_model):
        with pytest.raises(
            CheckpointError, match=r"zip archive of other .*: unzip it first; it holds \['JasperEncoder-"
        ):
            load(path)
    path.write_text("\n<!DOCTYPE html><html>")
    with pytest.raises(CheckpointError, match="but is a web page: download the file"):
        sources.load_model(path)


def test_a_folder_that_holds_a_file_of_nemos_is_not_read_as_one_of_transformers(tmp_path):
    (tmp_path / "x.nemo").write_bytes(b"")
    with pytest.raises(CheckpointError, match=rf"holds NeMo's: give {tmp_path}/x\.nemo$"):
        sources.load_model(tmp_path)


def test_a_folder_of_a_run_is_told_by_its_weights(tmp_path):
    for name in ("tiny-00000002.pt", "tiny.pt", "tiny.yaml"):
        (tmp_path / name).touch()
    with pytest.raises(CheckpointError, match=rf"holds a run: give {tmp_path}/tiny\.pt$"):
        sources.load_model(tmp_path)


def test_what_is_not_there_is_no_checkpoint(tmp_path):
    for name in ("a.nemo", "a.pt", "a"):
        with pytest.raises(CheckpointError, match=f"{name} must be a checkpoint, but there is no such file$"):
            sources.read(tmp_path / name)


@pytest.mark.parametrize("is_there", [False, True])
def test_an_archive_taken_apart_is_read_once_packed_as_the_message_says(is_there, tmp_path, monkeypatch):
    folder = tmp_path / "my model's"
    folder.mkdir()
    subprocess.run(["tar", "-C", folder, "-xf", REFERENCES / "quartznet.nemo"], check=True)
    monkeypatch.chdir(folder if is_there else tmp_path)
    with pytest.raises(CheckpointError, match=r"is one taken apart; pack it: (.*)") as refusal:
        sources.read(Path() if is_there else Path(folder.name))
    subprocess.run(str(refusal.value).partition("pack it: ")[2], shell=True, check=True)
    packed = tmp_path / "my model's.nemo"
    assert sources.read(packed, "same")[0] == sources.read(REFERENCES / "quartznet.nemo", "same")[0]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_a_folder_of_links_is_packed_as_the_messages_say(link, tmp_path):
    """`tar` keeps the links, unless told not to."""
    folder, plain, packed = tmp_path / "x", tmp_path / "plain.nemo", tmp_path / "x.nemo"
    folder.mkdir()
    subprocess.run(["tar", "-C", folder, "-xf", REFERENCES / "quartznet.nemo"], check=True)
    (folder / nemo_archive.WEIGHTS_FILE).rename(folder / "last.ckpt")
    link(folder / "last.ckpt", folder / nemo_archive.WEIGHTS_FILE)
    names = ["last.ckpt", nemo_archive.CONFIG_FILE, nemo_archive.WEIGHTS_FILE]
    subprocess.run(["tar", "-C", folder, "-cf", plain, *names], check=True)
    with pytest.raises(CheckpointError, match=r"is a link or the like: .* `(tar [-a-z ]+)`") as refusal:
        sources.read(plain)
    with pytest.raises(CheckpointError, match="pack it: tar") as advice:
        sources.read(folder)
    command = str(advice.value).partition("pack it: ")[2]
    assert command.startswith(str(refusal.value).split("`")[1])
    subprocess.run(command, shell=True, check=True)
    assert sources.read(packed, "same")[0] == sources.read(REFERENCES / "quartznet.nemo", "same")[0]
