"""
The three stages that the workers run, in plain Python.

The stages are in their own module, because the workers import it by name. Each stage checks now and then whether its
call was canceled. A function that does so keeps its worker alive after a cancel.
"""

from __future__ import annotations

import math
import os
import zlib
from typing import NamedTuple

from examples.demo.photo import HEIGHT, WIDTH, Negative, Photo

from penstock import current_call


class Developed(NamedTuple):
    photo: Photo
    pid: int  # of the worker that did it
    attempt: int


class Report(NamedTuple):
    photo: Photo
    brightness: float
    entropy: float  # bits a pixel
    fingerprint: int  # alike for photos that look alike


def decode(negative: Negative) -> Developed:
    """Unpack the photo, then smooth the grain with the neighboring pixels."""
    raw = zlib.decompress(negative.packed)
    stride = WIDTH * 3
    rows = [raw[at : at + stride] for at in range(0, len(raw), stride)]
    for _ in range(4):
        rows = [_smooth(row) for row in rows]
        rows = [_blend(a, b) for a, b in zip(rows, [*rows[1:], rows[-1]], strict=True)]
    call = current_call()
    photo = Photo(negative.number, negative.album, WIDTH, HEIGHT, b"".join(rows))
    return Developed(photo, os.getpid(), call.attempt if call else 1)


def _smooth(row: bytes) -> bytes:
    _check_cancel()
    padded = row[:3] + row + row[-3:]
    return bytes([(a + 2 * b + c) >> 2 for a, b, c in zip(padded[:-6], row, padded[6:], strict=True)])


def _blend(row: bytes, below: bytes) -> bytes:
    return bytes([(a + b) >> 1 for a, b in zip(row, below, strict=True)])


def resize(photo: Photo) -> Photo:
    """Scale to a third, each pixel the mean of nine, then stretch to full contrast."""
    stride, wide = photo.width * 3, photo.width // 3
    small = bytearray()
    for at in range(0, len(photo.pixels), 3 * stride):
        _check_cancel()
        rows = (photo.pixels[at + n * stride : at + (n + 1) * stride] for n in range(3))
        sums = [a + b + c for a, b, c in zip(*rows, strict=True)]
        for x in range(0, stride, 9):
            small += bytes((sums[x + c] + sums[x + c + 3] + sums[x + c + 6]) // 9 for c in range(3))
    low, high = min(small), max(small)
    stretch = bytes((min(max(v - low, 0) * 255 // max(high - low, 1), 255)) for v in range(256))
    return photo._replace(width=wide, height=photo.height // 3, pixels=bytes(small.translate(stretch)))


def analyse(photo: Photo) -> Report:
    """Compute brightness, entropy, and a fingerprint from the signs of the lowest frequencies."""
    values = photo.pixels
    light = [
        (r * 3 + g * 6 + b) // 10 for r, g, b in zip(values[::3], values[1::3], values[2::3], strict=True)
    ]
    shares = [light.count(level) / len(light) for level in set(light)]
    entropy = -sum(share * math.log2(share) for share in shares)
    fingerprint = 0
    for v in range(4):
        _check_cancel()
        for u in range(4):
            fingerprint = fingerprint << 1 | (_frequency(light, photo.width, u, v) > 0)
    return Report(photo, sum(light) / len(light), entropy, fingerprint)


def _frequency(light: list[int], width: int, u: int, v: int) -> float:
    across = [math.cos((2 * x + 1) * u * math.pi / (2 * width)) for x in range(width)]
    height = len(light) // width
    total = 0.0
    for y in range(height):
        row = light[y * width : (y + 1) * width]
        total += math.cos((2 * y + 1) * v * math.pi / (2 * height)) * sum(
            map(float.__mul__, across, map(float, row))
        )
    return total


def _check_cancel() -> None:
    call = current_call()
    if call is not None:
        call.check()
