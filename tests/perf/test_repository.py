import pytest
from carnelian_perf.repository import WrongModelError, check_model


def test_unknown_model_is_refused_with_the_known_ones(repository):
    with pytest.raises(WrongModelError, match="'jasper'; it has quartznet_demo"):
        check_model(repository, "jasper")


def test_missing_repository_is_refused(tmp_path):
    with pytest.raises(WrongModelError, match="is not there"):
        check_model(tmp_path / "none", "quartznet_demo")
