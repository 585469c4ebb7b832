"""What an export says of the settings that it changes."""

from carnelian_export.model_configs import read_config
from carnelian_export.repository import write_model
from carnelian_export.target import Target
from carnelian_export.tuning import StageTuning


def test_tunings_that_an_export_changes_are_named(tmp_path, config, network, caplog):
    for threads in (1, 2):
        tuned = {stage: StageTuning(instances=threads, threads=threads) for stage in ("decode", "features")}
        write_model(tmp_path / "r", "tiny", config, network, target=Target(tuning=tuned))
    (warning,) = caplog.messages
    group = "instance_group was [count: 1 kind: KIND_CPU ], is [count: 2 kind: KIND_CPU ]"
    by_hand = "an edit of config.pbtxt or another version of carnelian-export)"
    assert warning.splitlines()[1:] == [
        f"  audio_decode: {group} (it comes from --tuning or an edit of config.pbtxt)",
        f"  audio_decode: num_threads was 1, is 2 (it comes from --tuning, {by_hand}",
        f"  tiny_features: {group} (it comes from --tuning or an edit of config.pbtxt)",
        "  tiny_features: num_threads was 1, is 2 "
        f"(it comes from --precision, --execution-provider, --tuning, {by_hand}",
    ]


def test_edits_that_an_export_undoes_are_named(tmp_path, config, network, caplog):
    write_model(tmp_path / "r", "tiny", config, network)
    paths = [tmp_path / "r" / f"tiny_{stage}" / "config.pbtxt" for stage in ("acoustic", "ctc", "features")]
    acoustic, ctc, features = map(read_config, paths)
    acoustic.version_policy.latest.num_versions = 2
    acoustic.response_cache.enable = True
    acoustic.model_warmup[-1].count = 7
    acoustic.optimization.priority = acoustic.optimization.PRIORITY_MAX
    acoustic.dynamic_batching.default_queue_policy.max_queue_size = 8
    ctc.response_cache.enable = True
    del features.parameters["max_pending_requests"]
    features.ClearField("model_warmup")
    for path, edited in zip(paths, (acoustic, ctc, features), strict=True):
        path.write_text(str(edited))
    write_model(tmp_path / "r", "tiny", config, network)
    (warning,) = caplog.messages
    by_hand = "(it comes from an edit of config.pbtxt or another version of carnelian-export)"
    *lines, warm_up = warning.splitlines()[1:]
    longest = next(line for line in lines if "model_warmup" in line)
    lines.remove(longest)
    assert longest.startswith("  tiny_acoustic: model_warmup was ... ")
    assert "count: 7 ], is ... " in longest
    assert longest.endswith(by_hand.replace("an edit", "--execution-provider, an edit"))
    assert lines == [
        "  tiny_acoustic: dynamic_batching was default_queue_policy { max_queue_size: 8 }, is {} "
        "(it comes from --tuning or an edit of config.pbtxt)",
        "  tiny_acoustic: optimization was priority: PRIORITY_MAX, is not there "
        "(it comes from --execution-provider or an edit of config.pbtxt)",
        f"  tiny_acoustic: response_cache was enable: true, is not there {by_hand}",
        f"  tiny_acoustic: version_policy was latest {{ num_versions: 2 }}, is not there {by_hand}",
        f"  tiny_ctc: response_cache was enable: true, is not there {by_hand}",
        f"  tiny_features: max_pending_requests was not there, is 128 {by_hand}",
    ]
    assert warm_up.startswith("  tiny_features: model_warmup was not there, is [name: ")
    by_option = by_hand.replace("an edit", "--precision, --execution-provider, --tuning, an edit")
    assert warm_up.endswith(f" ... {by_option}")
