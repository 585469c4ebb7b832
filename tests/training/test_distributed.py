import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from carnelian_training.config_tree import config_to_dict
from carnelian_training.distributed import joined
from carnelian_training.loop.metrics import read_metrics
from carnelian_training.loop.run_checkpoints import checkpoints
from carnelian_training.loop_config import FreezeConfig, OptimizerConfig

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
SCRIPT = Path(__file__).parent / "run_steps.py"
# Sums in another order, through ten steps of the optimiser.
TOLERANCE = 1e-5


@pytest.fixture
def variants(without_dropout, changed, tmp_path):
    """Steps of one to three clips, so that the second process is without any in some; dropout differs by process."""
    # NovoGrad, for AdamW makes whole steps out of gradients that are nothing but rounding.
    novograd = OptimizerConfig(name="novograd", lr=0.005, warmup_steps=1)
    muon = OptimizerConfig(name="muon", lr=0.05, betas=(0.9, 0.98), warmup_steps=1)
    config = dataclasses.replace(changed(without_dropout, data={"batch_s": 11}), optimizer=novograd)
    thawing = {"checkpoint": tmp_path / "any.pt", "freeze": (FreezeConfig(stages="body", until_step=4),)}
    frozen = changed(config, loop={"batch_statistics": "frozen"})
    found = {
        "shared": changed(config, loop={"batch_statistics": "shared"}),
        "frozen": frozen,
        "process": config,
        "muon": dataclasses.replace(frozen, optimizer=muon),
        "parts": changed(frozen, data={"device_batch_s": 5}),
        "thawing": changed(config, loop={"batch_statistics": "shared"}, init=thawing),
        "single": changed(config, data={"batch_s": 1}, optimizer={"ema": 0.9}),
    }
    paths = {}
    for name, variant in found.items():
        paths[name] = tmp_path / f"{name}.json"
        paths[name].write_text(json.dumps(config_to_dict(variant)))
    return paths


def test_two_processes_equal_one(variants, run_steps):
    command = [*TORCHRUN, str(SCRIPT), "10", *map(str, variants.values())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    two = dict(zip(variants, map(json.loads, done.stdout.splitlines()), strict=True))
    one = dict(zip(variants, run_steps(10, variants.values()), strict=True))
    for name in ("shared", "frozen", "parts", "thawing", "single"):
        assert two[name]["losses"] == pytest.approx(one[name]["losses"], abs=TOLERANCE), name
        assert two[name]["norms"] == pytest.approx(one[name]["norms"], rel=1e-3), name  # NovoGrad takes any for 1
    # Muon's AdamW may make a step out of rounding; processes that do not share their matrices are 0.1 apart.
    assert two["muon"]["losses"] == pytest.approx(one["muon"]["losses"], abs=1e-3)
    assert two["shared"]["empty"] > 0
    assert two["single"]["empty"] == 10
    for name in ("shared", "single"):
        for statistics in two[name]["statistics"]:
            assert statistics == pytest.approx(one[name]["statistics"][0], abs=TOLERANCE), name
    of_first, of_second = two["process"]["statistics"]
    assert of_first == of_second
    assert one["parts"]["parts"] > 15 > one["frozen"]["parts"] == 10
    assert one["parts"]["losses"] == pytest.approx(one["frozen"]["losses"], abs=TOLERANCE)
    # The comparisons mean something: with statistics of their own, or a body that learns, there is another loss.
    assert two["process"]["losses"] != pytest.approx(one["process"]["losses"], abs=1e-3)
    assert two["thawing"]["losses"] != pytest.approx(two["shared"]["losses"], abs=1e-3)


def test_a_killed_process_restarts_all_from_the_last_checkpoint(
    tiny_config, changed, tmp_path, fit_until_killed, wait_until
):
    config = changed(tiny_config, loop={"steps": 16, "checkpoint_every_steps": 1, "evaluate_every_steps": 16})
    command = [*TORCHRUN, "--max-restarts=1", "--monitor-interval=0.1", *fit_until_killed(config, tmp_path / "run")]
    environment = os.environ | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True) as job:
        try:
            wait_until(lambda: job.poll() is not None or checkpoints(tmp_path / "run", config), timeout_s=300)
            if job.poll() is None:
                os.kill(second_worker(job.pid), signal.SIGKILL)
            _, log = job.communicate(timeout=300)
        finally:
            job.terminate()  # and with it its workers, where it has not ended
    assert job.returncode == 0, log
    resumed = int(re.search(r"resuming .* at step (\d+)", log)[1])
    assert 1 <= resumed < 16
    records = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [record["step"] for record in records if "loss" in record] == list(range(1, 17))


def test_a_restart_that_could_not_work_is_refused_before_the_first_step(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with pytest.raises(RuntimeError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"), joined():
        pass


def second_worker(launcher: int) -> int:
    """The process with rank 1 among the children of `torchrun`."""
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    (worker,) = [int(pid) for pid in children if b"\0RANK=1\0" in Path(f"/proc/{pid}/environ").read_bytes()]
    return worker
