"""The Unix format .Z is unpacked as gzip does it."""

import random

import pytest

from coterie.core.errors import DataError
from coterie_lab.sources.lzw import unpack_z


def pack_z(content: bytes, most: int = 16) -> bytes:
    """A small packer: codes in groups of eight, padded when the width changes."""
    table = {bytes([i]): i for i in range(256)}
    width, bits, place, start, word, free = 9, 0, 0, 0, b"", 257
    for i in range(len(content)):
        letter = content[i : i + 1]
        if word + letter in table:
            word += letter
            continue
        bits |= table[word] << place
        place += width
        if free < 1 << most:
            table[word + letter] = free
            free += 1
        if free - 1 > (1 << width) - 1 and width < most:  # the reader is one entry behind
            place = start + -(-(place - start) // (8 * width)) * 8 * width
            width, start = width + 1, place
        word = letter
    if word:
        bits |= table[word] << place
        place += width
    return b"\x1f\x9d" + bytes([most | 128]) + bits.to_bytes(-(-place // 8), "little")


@pytest.mark.parametrize("size", [0, 1, 5, 3000, 60_000])
@pytest.mark.parametrize("most", [10, 16])
def test_what_was_packed_is_unpacked(size, most):
    draw = random.Random(size)
    content = bytes(draw.choice(b"0123456789.,-\n") for _ in range(size))
    assert unpack_z(pack_z(content, most)) == content


def test_a_repeated_letter_uses_the_entry_that_is_being_made():
    assert unpack_z(pack_z(b"a" * 1000)) == b"a" * 1000


def test_other_files_and_damaged_ones_are_refused():
    with pytest.raises(DataError, match="written by compress"):
        unpack_z(b"\x1f\x8b\x08", "waveform.data.Z")
    with pytest.raises(DataError, match="damaged"):
        unpack_z(b"\x1f\x9d\x90" + b"\xff" * 4)
