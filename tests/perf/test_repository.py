import shutil

import pytest
from carnelian_perf.repository import WrongModelError, check_model, read_config


def test_stages_that_are_missing_are_named(repository, tmp_path):
    for folder in ("quartznet_demo", "quartznet_demo_acoustic", "audio_decode"):
        (tmp_path / folder).mkdir()
        shutil.copy(repository / folder / "config.pbtxt", tmp_path / folder)
    with pytest.raises(WrongModelError, match=r"lacks quartznet_demo_features, quartznet_demo_ctc"):
        check_model(tmp_path, "quartznet_demo")


@pytest.mark.parametrize("content", [b"name: quartznet", b"\xff"])
def test_a_damaged_configuration_is_named(content, tmp_path):
    (tmp_path / "config.pbtxt").write_bytes(content)
    with pytest.raises(WrongModelError, match=r"config\.pbtxt must be a model's configuration, but is not: "):
        read_config(tmp_path)
