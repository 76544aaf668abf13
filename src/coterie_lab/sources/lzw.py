"""Unpack files of the Unix program compress (.Z), which Python's library does not read."""

from coterie.core.errors import DataError

MAGIC = b"\x1f\x9d"
CLEAR = 256  # the code that empties the table


def unpack_z(packed: bytes, name: str = "file") -> bytes:
    """Unpack the content of a .Z file (Lempel, Ziv and Welch, codes of 9 to 16 bits).

    Codes are stored in groups of eight; when their width changes, the rest of a group is padding.
    """
    if packed[:2] != MAGIC or len(packed) < 3 or not 9 <= packed[2] & 31 <= 16:
        raise DataError(f"{name} must be a file written by compress (.Z). Get it again.")
    most, clears = packed[2] & 31, bool(packed[2] & 128)
    first = 257 if clears else 256
    size = 8 * (len(packed) - 3)
    table = [bytes([i]) for i in range(256)] + [b""] * (first - 256)
    out: list[bytes] = []
    width, start, place, last = 9, 0, 0, b""
    piece, taken = int.from_bytes(packed[3:516], "little"), 0  # 4,096 bits and more at a time

    def widen(new: int) -> None:
        nonlocal width, start, place
        group = 8 * width
        place = start + -(-(place - start) // group) * group
        width, start = new, place

    while True:
        if len(table) > (1 << width) - 1 and width < most:
            widen(width + 1)
        if place + width > size:
            return b"".join(out)
        if place + width > taken + 4096:
            taken = place
            at = 3 + taken // 8
            piece = int.from_bytes(packed[at : at + 513], "little") >> (taken % 8)
        code = piece >> (place - taken) & ((1 << width) - 1)
        place += width
        if clears and code == CLEAR:
            del table[first:]
            last = b""
            widen(9)
            continue
        if code > len(table) or (code == len(table) and not last):
            raise DataError(f"{name} is damaged (unknown code {code}). Get it again.")
        word = table[code] if code < len(table) else last + last[:1]
        out.append(word)
        if last and len(table) < 1 << most:
            table.append(last + word[:1])
        last = word
