"""Files of a run folder, which may come from a stranger.

Links are not followed, names stay inside their folder, and sizes and nesting are checked before a
file is parsed. What is written is for its owner only (0700 and 0600), whole or not at all.
"""

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import torch

from coterie.core.errors import ConfigError, CoterieError, DataError

RUN_FILE = 16 * 2**20
"""Bytes of a run file, of a manifest, or of one line of a log."""
JSON = 256 * 2**20
"""Bytes of any other JSON file: rows of about a million clients."""
LOG = 2**30
"""Bytes of a log."""
DEPTH = 64
"""Levels of nesting in JSON. What Coterie writes has less than ten."""

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)


# Write


def write(path: Path, data: bytes, mode: int = 0o600) -> str:
    """Write a file whole or not at all; its checksum."""
    aside = path.with_name(path.name + ".part")
    try:
        with contextlib.suppress(FileNotFoundError):
            aside.unlink()  # of a run that was killed, or a link
        handle = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, mode)
        with open(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
        _sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            aside.unlink()
        if error.errno in _FULL:
            raise DataError(
                f"{path.parent}: the disk is full, so {path.name} could not be written. Earlier "
                "checkpoints are intact. Free some space, then resume."
            ) from error
        raise DataError(f"{path} could not be written ({error.strerror}).") from error
    return hashlib.sha256(data).hexdigest()


def append(path: Path, text: str) -> None:
    """Add text to the end of a file."""
    try:
        with _open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, "ab") as file:
            file.write(text.encode())
    except OSError as error:
        raise DataError(
            f"{path.parent}: {path.name} could not be written ({error.strerror}). Earlier "
            "checkpoints are intact. Free some space, then resume."
        ) from error


def sync(path: Path) -> None:
    """Force what was appended to a file to disk."""
    with contextlib.suppress(FileNotFoundError), _open(path, os.O_RDONLY, "rb") as file:
        os.fsync(file.fileno())


def cut(path: Path, size: int) -> None:
    """Cut a file off after some bytes."""
    with _open(path, os.O_RDWR, "r+b") as file:
        file.truncate(size)


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def make_folder(path: Path) -> None:
    """Create a folder for its owner only, unless it exists."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise DataError(
            f"Folder {path} cannot be made: {error.strerror}. Choose another place, where you may "
            "write."
        ) from error


def to_json(value: Any) -> bytes:
    """Indented JSON; equal content gives equal bytes."""
    return (json.dumps(value, indent=2, default=plain) + "\n").encode()


def plain(value: Any) -> Any:
    """Tensors and paths as JSON has them."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"{type(value).__name__} cannot be written as JSON")


def no_nan(value: Any) -> Any:
    """NaN and infinity as None: JSON has neither."""
    if isinstance(value, dict):
        return {key: no_nan(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [no_nan(part) for part in value]
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return None
    return value


# Read


def inside(folder: Path, name: Any) -> Path:
    """The file of a folder that has a name; a name that leads out of the folder is refused."""
    bad = not isinstance(name, str) or name in ("", ".", "..") or any(c in name for c in "/\\\0")
    if bad:
        raise DataError(
            f"{folder}: a file must be named by its name alone, and lie in this folder. Got "
            f"{str(name)[:100]!r}. Do not use a folder that names others."
        )
    return folder / str(name)


def read(path: Path, most: int | None = None, last: int | None = None) -> bytes:
    """A file's content, or its last bytes; a file that is too large is refused."""
    with _open(path, os.O_RDONLY, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if most is not None and size > most:
            raise DataError(
                f"{path} must have at most {most // 2**20} MB. It has {size / 2**20:.0f}. Coterie "
                "did not write it."
            )
        if last is not None:
            file.seek(max(0, size - last))
        return file.read()


def _open(path: Path, flags: int, mode: str) -> IO[bytes]:
    """Open a plain file; links and special files are refused."""
    try:
        # Without O_NONBLOCK a pipe would wait for its other end.
        handle = os.open(path, flags | _NO_LINK | getattr(os, "O_NONBLOCK", 0), 0o600)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise _refuse_link(path) from None
        if flags == os.O_RDONLY and error.errno not in (errno.ENOENT, errno.ENOTDIR):
            raise DataError(f"{path} cannot be read ({error.strerror}).") from error
        raise
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise DataError(f"{path} must be a plain file. It is not. Remove it.")
    return open(handle, mode)


def read_json(path: Path, most: int = RUN_FILE) -> dict[str, Any]:
    """A JSON file, or a clear error."""
    try:
        data = read(path, most)
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{path.parent} is not a run folder: it has no {path.name}.") from None
    content = parse_json(data, str(path))
    if not isinstance(content, dict):
        raise DataError(f"{path} is damaged: it does not hold a JSON object.")
    return content


def parse_json(data: bytes, source: str) -> Any:
    """The content of JSON text that is not nested too deeply.

    >>> parse_json(b'{"a": [1, 2]}', "run.json")
    {'a': [1, 2]}
    """
    if is_deep(data):
        raise DataError(f"{source} is damaged: it is nested more than {DEPTH} levels deep.")
    try:
        content = json.loads(data)
        if b"\\u" in data:  # half of a character can be read, but not printed or written
            json.dumps(content, ensure_ascii=False).encode()
    except UnicodeError:
        raise DataError(f"{source} is damaged: it contains text that is not Unicode.") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{source} is damaged: it is not JSON ({error}).") from None
    return content


def is_deep(data: bytes) -> bool:
    """Whether JSON text is nested too deeply to be parsed.

    >>> is_deep(b"[" * 100 + b"]" * 100), is_deep(b"[]" * 100)
    (True, False)
    """
    if data.count(b"[") + data.count(b"{") <= DEPTH:
        return False
    depth = 0
    for token in _TOKENS.finditer(data):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
            if depth > DEPTH:
                return True
        elif first in b"]}":
            depth -= 1
    return False


@contextmanager
def blame(source: Path | str) -> Iterator[None]:
    """Name the folder or file whose content cannot be used, whatever goes wrong with it."""
    try:
        yield
    except CoterieError:
        raise
    except Exception as error:
        said = str(error).splitlines()[0][:200] if str(error) else ""
        raise DataError(
            f"{source} is damaged, or another program wrote it ({type(error).__name__}: {said})."
        ) from error


def _refuse_link(path: Path) -> DataError:
    return DataError(
        f"{path} is a link, and links in a run folder are not followed. Replace it by what it "
        "links to, if you trust that."
    )


def refuse_links(folder: Path, path: Path) -> None:
    """Raise an error if a path below a folder leads through a link."""
    for part in [path, *path.parents]:
        if part == folder:
            return
        if part.is_symlink():
            raise _refuse_link(part)


# Lock

_HELD: dict[tuple[Path, int], int] = {}  # folders this process has locked, by thread


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a folder for this thread; another process or thread that has it is an error."""
    try:
        import fcntl
    except ImportError:  # a system without file locks
        yield
        return
    key = folder.resolve(), threading.get_ident()
    if key in _HELD:
        yield
        return
    handle = os.open(folder, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another process is writing to this run folder. Wait until it ends, or "
                "stop it, then try again."
            ) from None
        except OSError as error:
            warnings.warn(
                f"{folder} is on a file system without locks ({error.strerror}). Do not resume it "
                "twice at the same time.",
                stacklevel=3,
            )
        _HELD[key] = handle
        try:
            yield
        finally:
            del _HELD[key]
    finally:
        os.close(handle)
