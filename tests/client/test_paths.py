"""Clips that are named by a path."""

import os

import pytest
from carnelian_client import InvalidAudio


def test_an_empty_file_is_invalid_and_a_missing_one_is_the_systems_error(tmp_path, encode):
    (tmp_path / "empty.wav").touch()
    with pytest.raises(InvalidAudio, match=r"empty\.wav: empty audio"):
        encode(tmp_path / "empty.wav")
    with pytest.raises(FileNotFoundError):
        encode(tmp_path / "missing.wav")
    for name in ("", "https://host/a.wav"):
        with pytest.raises(FileNotFoundError, match=f"'{name}'$"):
            encode(name)


@pytest.mark.parametrize("name", ["a\0b.wav", "\ud800.wav"])
def test_a_name_that_no_file_can_have_is_the_systems_error_too(name, encode):
    with pytest.raises(OSError, match="a path must be a name that a file can have"):
        encode(name)


def test_a_file_that_no_server_takes_is_not_read(tmp_path, encode):
    huge = tmp_path / "huge.wav"
    huge.touch()
    os.truncate(huge, 2**40)  # sparse, and more than the memory holds
    with pytest.raises(InvalidAudio, match=r"huge\.wav: .* but has 1099511627776; convert it to FLAC, or cut"):
        encode(huge)


def test_a_device_without_an_end_is_not_read_for_ever(monkeypatch, encode):
    monkeypatch.setattr("carnelian_client._audio.MAX_BYTES", 100)
    with pytest.raises(InvalidAudio, match=r"/dev/zero: .* at most 100 bytes"):
        encode("/dev/zero")
