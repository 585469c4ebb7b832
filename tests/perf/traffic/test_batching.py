"""The whole measurement, small: two variants on the real server."""

from pathlib import Path

import pytest
from carnelian_perf.clips import WavClip, cut_clips
from carnelian_perf.load import LoadError
from carnelian_perf.raw_file import Traffic
from carnelian_perf.traffic.batching import Plan, measure

MANIFEST = Path(__file__).parents[3] / "demo/clips/manifest.jsonl"
NUM_REQUESTS = 40
"""A run takes many of the 10 ms in which the kernel counts CPU time."""


@pytest.fixture(scope="module")
def make_plan(repository, padded):
    def make(clips, candidates):
        return Plan(
            repository=repository,
            model="quartznet_demo",
            padded=padded,
            clips=clips,
            traffic=Traffic.of("the demo's", [1.0]),
            concurrency=4,
            num_requests=NUM_REQUESTS,
            rounds=1,
            candidates=candidates,
            queue_delays_ms=(5.0,),
        )

    return make


def test_variants_give_equal_transcripts_and_count_their_work(make_plan):
    clips = cut_clips(MANIFEST, 5)
    (measurement,) = measure(make_plan(clips, ["buckets", "ragged"]))
    assert measurement.mismatches == []
    runs = {run.candidate: run for run in measurement.runs}
    for run in runs.values():
        assert len(run.latencies_s) == NUM_REQUESTS
        assert sum(size * count for size, count in run.acoustic_batches.items()) == NUM_REQUESTS
        assert run.acoustic_compute_s > 0
        assert run.server_cpu_s > 0
    frames_of = [next(frames for frames in (401, 801, 1601) if frames >= clip.frames) for clip in clips]
    in_buckets = NUM_REQUESTS / len(clips) * sum(frames_of)
    assert runs["buckets"].processed_frames == pytest.approx(in_buckets)
    assert runs["ragged"].processed_frames < in_buckets


def test_clip_that_fails_ends_the_measurement_and_is_named(make_plan):
    broken = WavClip(b"no audio", 1.0, 101)
    with pytest.raises(LoadError, match=r"clip 0 \(1.0 s\)"):
        list(measure(make_plan([broken], ["ragged"])))
