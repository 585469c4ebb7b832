# mypy: ignore-errors
# DALI makes its operators when it is imported; its stubs know few of them.
"""The shipped feature stage with padding behind it: becomes `dali.py` of a variant's feature stage.

Beside it lie `shipped.py`, the stage as it is shipped, and `padding.json`: the frames of each bucket, in ascending
order, or no buckets, to pad to the longest clip of the batch. Either way, the frames are equal within a request, as
Triton requires: they follow from the rows' tensor shape, never from SIGNAL_LENGTH.
"""

import importlib.util
import itertools
import json
from pathlib import Path

from nvidia.dali import fn, pipeline_def, types
from nvidia.dali.plugin.triton import autoserialize

FOLDER = Path(__file__).parent


@autoserialize
@pipeline_def(batch_size=1, num_threads=1, device_id=None)
def serve():
    """SIGNAL, SIGNAL_LENGTH -> FEATURES [64, padded frames], FEATURE_LENGTH."""
    # Loaded in here: DALI looks for `@autoserialize` in every module that it finds as an attribute of this one.
    spec = importlib.util.spec_from_file_location("carnelian_shipped_features", FOLDER / "shipped.py")
    shipped = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shipped)
    features, feature_length = shipped.serve.__wrapped__()

    buckets = json.loads((FOLDER / "padding.json").read_text())["bucket_frames"]
    if not buckets:
        return fn.pad(features, axes=[1]), feature_length
    frames = features.shape(dtype=types.INT32)[1]
    padded = buckets[0]
    for smaller, larger in itertools.pairwise(buckets):
        padded = padded + (larger - smaller) * (frames > smaller)
    # A tensor over the limit is one frame here, so the last bucket holds everything.
    return fn.pad(features, axes=[1], shape=fn.reshape(padded, shape=[1])), feature_length
