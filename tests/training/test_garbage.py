"""What training leaves to Python's garbage collector, and what it spares it."""

import gc
import weakref

import pytest
from carnelian_training import garbage
from carnelian_training.config import ManifestConfig
from carnelian_training.data.manifest import Clip
from carnelian_training.loop import recognition
from carnelian_training.loop.recognition import read_training_clips
from carnelian_training.loop.train import train


def test_clips_are_no_matter_of_the_garbage_collector(tiny_config, changed, tmp_path):
    clips = read_training_clips(tiny_config)
    assert not any(isinstance(found, Clip) for found in gc.get_objects())
    assert all(gc.is_tracked(clip) for clip in clips)
    (tmp_path / "wrong.jsonl").write_text("{}")
    with pytest.raises(ValueError, match="audio_filepath"):
        read_training_clips(changed(tiny_config, data={"train": (ManifestConfig(path=tmp_path / "wrong.jsonl"),)}))
    assert gc.isenabled()


@pytest.mark.parametrize("is_frozen", [False, True])
@pytest.mark.parametrize("freezes_itself", [False, True], ids=["", "python 3.12"])
def test_what_the_caller_had_is_collected_after_a_run_unless_the_caller_froze_it(
    tiny_config, tmp_path, monkeypatch, is_frozen, freezes_itself
):
    class Node:
        pass

    gc.unfreeze()
    if freezes_itself:
        gc.freeze()
    monkeypatch.setattr(garbage, "_FROZEN_AT_FIRST", gc.get_freeze_count())
    node = Node()
    node.itself, alive = node, weakref.ref(node)
    if is_frozen:
        gc.freeze()
    train(tiny_config, tmp_path)
    del node
    gc.collect()
    assert (alive() is not None) == is_frozen
    gc.unfreeze()


def test_a_plan_is_gone_when_the_next_one_is_made(tiny_config, changed, tmp_path, monkeypatch):
    steps, left = [], []

    class Step(list):
        """A list that can be referred to weakly."""

    def plan_epoch(*args):
        left.append(sum(step() is not None for step in steps))
        made = [Step(items) for items in plan(*args)]
        steps.extend(map(weakref.ref, made))
        return made

    plan = recognition.plan_epoch
    monkeypatch.setattr(recognition, "plan_epoch", plan_epoch)
    train(changed(tiny_config, loop={"steps": 20, "evaluate_every_steps": 20}), tmp_path)
    assert len(left) > 1
    assert max(left) <= 1  # the last step
