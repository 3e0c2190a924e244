"""Makes random landscapes. Making one is cheap, because the caller does it; the workers do the expensive part."""

from __future__ import annotations

import math
import random
import zlib
from typing import Final, NamedTuple

WIDTH: Final = 144
HEIGHT: Final = 108
_LOW_BITS: Final = int.from_bytes(b"\x0f" * (WIDTH * HEIGHT * 3))


class Negative(NamedTuple):
    """The payload of the first stage, made only when the first stage has a place for it."""

    number: int
    album: str | None
    packed: bytes


class Photo(NamedTuple):
    number: int
    album: str | None
    width: int
    height: int
    pixels: bytes  # rgb, row by row


def take(number: int, album: str | None) -> Negative:
    """Draw sky, sun and two ridges of hills by columns: a slice costs less than a loop over pixels."""
    dice = random.Random(number)  # a landscape, not a secret
    top, horizon = _color(dice, 20, 120), _color(dice, 120, 255)
    sky = [_gradient(top[c], horizon[c]) for c in range(3)]
    sun_x, sun_y, radius = dice.randrange(20, WIDTH - 20), dice.randrange(12, 50), dice.randrange(6, 14)
    far, near = _ridge(dice, 64, 16), _ridge(dice, 88, 12)
    far_color = [(a + b) // 3 for a, b in zip(top, horizon, strict=True)]
    near_color = [a // 4 for a in far_color]
    image = bytearray(WIDTH * HEIGHT * 3)
    for x in range(WIDTH):
        half = math.isqrt(max(0, radius * radius - (x - sun_x) ** 2))
        for c, light in enumerate((255, 236, 180)):
            column = bytearray(sky[c])
            column[sun_y - half : sun_y + half] = bytes([light]) * (2 * half)
            column[far[x] :] = bytes([far_color[c]]) * (HEIGHT - far[x])
            column[near[x] :] = bytes([near_color[c]]) * (HEIGHT - near[x])
            image[x * 3 + c :: WIDTH * 3] = column
    return Negative(number, album, zlib.compress(_grain(dice, image), 1))


def _grain(dice: random.Random, image: bytearray) -> bytes:
    """Add film grain, on integers of 370,000 bits: a loop over bytes would take the caller 5 ms."""
    noise = int.from_bytes(dice.randbytes(len(image))) & _LOW_BITS
    return (int.from_bytes(image) ^ noise).to_bytes(len(image))


def _color(dice: random.Random, low: int, high: int) -> list[int]:
    return [dice.randrange(low, high) for _ in range(3)]


def _gradient(above: int, below: int) -> bytes:
    return bytes(above + (below - above) * y // HEIGHT for y in range(HEIGHT))


def _ridge(dice: random.Random, base: int, height: int) -> list[int]:
    waves = [(dice.uniform(0.02, 0.14), dice.uniform(0, 6.3), dice.uniform(0.2, 0.6)) for _ in range(3)]
    return [
        min(HEIGHT, base + int(sum(math.sin(x * f + p) * a for f, p, a in waves) * height))
        for x in range(WIDTH)
    ]
