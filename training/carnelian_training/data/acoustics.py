"""Acoustic augmentation of waveforms in training: reverberation, noise, gain and dither.

Input: a 16 kHz signal and a :class:`Disturbance`, drawn for one clip in one epoch. Output: the disturbed signal, of the
same length and not shifted in time, so that transcripts and lengths stay right.
"""

import logging
import os
import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import soundfile
import soxr
import torch

from carnelian_training.config import AugmentConfig
from carnelian_training.config_errors import ConfigError
from carnelian_training.data.audio import check_regular
from carnelian_training.features import SAMPLE_RATE_HZ

logger = logging.getLogger(__name__)

Signal = npt.NDArray[np.float32]

SUFFIXES = {".flac", ".mp3", ".ogg", ".opus", ".wav"}
_naming = threading.Lock()  # several threads may find the same file broken


@dataclass(frozen=True, slots=True)
class Disturbance:
    """The acoustic augmentation of one clip in one epoch."""

    room: Path | None = None
    """The file of a room impulse response; None: no reverberation."""
    noise: Path | None = None
    """The file of noise to add; None: no noise."""
    noise_start: float = 0.0
    """The place in the noise file to begin at, as a share of its length."""
    snr_db: float = 0.0
    """The signal-to-noise ratio over the whole clip, in dB."""
    gain_db: float = 0.0
    """The change of the level, in dB."""
    dither: float = 0.0
    """The standard deviation of added white noise, relative to a full scale of 1."""
    dither_seed: int = 0


UNDISTURBED = Disturbance()
NO_ROOM, NO_NOISE = np.ones(1, np.float32), np.zeros(1, np.float32)
"""The impulse response and the noise that change nothing."""


@dataclass(frozen=True)
class Sounds:
    """The impulse responses and noises that an epoch draws from."""

    rooms: tuple[Path, ...] = ()
    noises: tuple[Path, ...] = ()

    @classmethod
    def find(cls, config: AugmentConfig) -> "Sounds":
        """List the sounds of the configured folders.

        Raises:
            ConfigError: A folder holds no sound file.
        """
        rooms = _find_some(config.reverberation.path) if config.reverberation else ()
        return cls(rooms, _find_some(config.noise.path) if config.noise else ())

    def draw(self, config: AugmentConfig, rng: random.Random) -> Disturbance:
        """Draw the disturbance of one clip; each kind has its own probability, independent of the others."""
        gain_db = rng.uniform(*config.gain_db)
        disturbance = Disturbance(gain_db=gain_db) if gain_db else UNDISTURBED
        if config.reverberation and rng.random() < config.reverberation.probability:
            disturbance = replace(disturbance, room=rng.choice(self.rooms))
        if config.noise and rng.random() < config.noise.probability:
            noise, start, snr_db = rng.choice(self.noises), rng.random(), rng.uniform(*config.noise.snr_db)
            disturbance = replace(disturbance, noise=noise, noise_start=start, snr_db=snr_db)
        if config.dither:
            disturbance = replace(disturbance, dither=config.dither, dither_seed=rng.getrandbits(63))
        return disturbance


def read_sound(path: Path) -> Signal:
    """Read a whole sound file as [samples] float32, mono at 16 kHz.

    Raises:
        ConfigError: The file cannot be read.
    """
    try:
        check_regular(path)
        return to_mono_16khz(*soundfile.read(path, dtype="float32", always_2d=True))
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path} must be a sound file: {error}") from error


def read_room(path: Path) -> Signal:
    """Read an impulse response from its direct sound on, scaled to unit energy.

    Raises:
        ConfigError: The file cannot be read, or is silent or not finite.
    """
    response = read_sound(path)
    energy = np.linalg.norm(response)
    if not 0 < energy < np.inf:
        raise ConfigError(f"{path} must be an impulse response, but its energy is {energy}")
    response = response[np.abs(response).argmax() :]
    return np.asarray(response / np.linalg.norm(response), np.float32)


def read_noise(path: Path, start: float, duration_s: float) -> Signal:
    """Read `duration_s` of noise, or the whole of a shorter file; after its end, go on from its beginning.

    Args:
        path: the file.
        start: the place in the file to begin at, as a share of its length.
        duration_s: the seconds of noise that are needed.

    Raises:
        ConfigError: The file cannot be read, is empty, or is not finite.
    """
    try:
        check_regular(path)
        with soundfile.SoundFile(path) as file:
            needed = int((duration_s + 0.1) * file.samplerate)
            before = file.seek(int(start * file.frames))
            from_start = file.read(needed, dtype="float32", always_2d=True)
            file.seek(0)
            around = file.read(min(before, needed - len(from_start)), dtype="float32", always_2d=True)
            noise = to_mono_16khz(np.concatenate([from_start, around]), file.samplerate)
    except (OSError, RuntimeError) as error:
        raise ConfigError(f"{path} must be a sound file: {error}") from error
    if not len(noise) or not np.isfinite(noise).all():
        raise ConfigError(f"{path} must hold finite samples, one at 16 kHz at least, but does not")
    return noise


def read_sounds(disturbance: Disturbance, duration_s: float, broken: set[Path]) -> tuple[Signal, Signal]:
    """Read the room and the noise of a signal of `duration_s`.

    Args:
        disturbance: names the files.
        duration_s: the duration of the signal in seconds.
        broken: files that cannot be used are added; the log names each once, and signals are left without it.
    """

    def usable(path: Path | None, read: Callable[[Path], Signal], instead: Signal) -> Signal:
        if path is None or path in broken:
            return instead
        try:
            return read(path)
        except ConfigError as error:
            with _naming:
                if path not in broken:
                    broken.add(path)
                    logger.warning("%s; going on without it", error)
        return instead

    room = usable(disturbance.room, read_room, NO_ROOM)
    read_its_noise = partial(read_noise, start=disturbance.noise_start, duration_s=duration_s)
    noise = usable(disturbance.noise, read_its_noise, NO_NOISE)
    return room, noise


def disturb(signal: Signal, room: Signal, noise: Signal, disturbance: Disturbance) -> Signal:
    """Reverberate `signal`, add noise, change its level and add dither: [samples] float32.

    Args:
        signal: [samples] float32, mono, 16 kHz.
        room: impulse response of any length that starts with the direct sound.
        noise: noise of any length, repeated if it is shorter than the signal; silence adds nothing.
        disturbance: gives the signal-to-noise ratio, the gain and the dither.
    """
    if len(room) > 1 and len(signal):
        size = 1 << (len(signal) + len(room) - 2).bit_length()
        # PyTorch's FFT, because numpy's holds Python's interpreter lock, which would delay the training step.
        sound, response = torch.from_numpy(signal), torch.from_numpy(room)
        spectrum = torch.fft.rfft(sound, size) * torch.fft.rfft(response, size)
        signal = torch.fft.irfft(spectrum, size)[: len(signal)].numpy()
    if noise[: len(signal)].any():  # skips silence, because np.resize takes ten milliseconds to repeat a single sample
        noise = np.resize(noise, len(signal))
        noise_rms = np.sqrt(np.mean(noise**2))
        if noise_rms > 0:
            signal_rms = np.sqrt(np.mean(signal**2))
            signal = signal + noise * (signal_rms / noise_rms * 10 ** (-np.float32(disturbance.snr_db) / 20))
    signal = signal * 10 ** (np.float32(disturbance.gain_db) / 20)
    if disturbance.dither:
        white = np.random.default_rng(disturbance.dither_seed).standard_normal(len(signal), np.float32)
        signal = signal + np.float32(disturbance.dither) * white
    return signal.astype(np.float32)


def find_sounds(folder: Path) -> tuple[Path, ...]:
    """List the sound files of a folder, subfolders included, in an order that does not depend on the file system.

    Links to folders are followed. A folder that is reached in several ways, as by a link back, is searched once. What
    is hidden is left out: it is partial, or what other systems write beside a sound.

    Raises:
        OSError: A folder cannot be read. One that is not there, or may not be read, is passed over.
    """
    found: list[Path] = []
    searched: set[Path] = set()
    for place, folders, names in os.walk(folder, onerror=_pass_over, followlinks=True):
        if (real := Path(place).resolve()) in searched:
            folders.clear()
            continue
        searched.add(real)
        folders[:] = sorted(name for name in folders if not name.startswith("."))  # the first of several ways is taken
        paths = [Path(place, name) for name in names if not name.startswith(".")]
        found += [path for path in paths if path.suffix.lower() in SUFFIXES]
    return tuple(sorted(found))


def _pass_over(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | PermissionError):
        raise error


def _find_some(folder: Path) -> tuple[Path, ...]:
    if folder.is_file():
        raise ConfigError(f"{folder} must be a folder of sound files, but is a file: give its folder")
    files = find_sounds(folder)
    if not files:
        raise ConfigError(f"{folder} must hold sound files ({', '.join(sorted(SUFFIXES))}), but none was found")
    return files


def to_mono_16khz(sound: Signal, rate_hz: int) -> Signal:
    """Mix channels and resample: [samples, channels] at any rate -> [samples] at 16 kHz."""
    mono = sound.mean(1)
    return mono if rate_hz == SAMPLE_RATE_HZ else np.asarray(soxr.resample(mono, rate_hz, SAMPLE_RATE_HZ), np.float32)
