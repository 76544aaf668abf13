"""Images in folders: client/class/image.png."""

from pathlib import Path

import numpy as np

from coterie.core.errors import DataError
from coterie.data.cells import Cells, RawTable
from coterie.data.limits import PIXELS, check_pixels, refuse_links_out

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp")


def read_client(folder: Path, size: tuple[int, int] | None, flat: bool = False) -> RawTable:
    """The images of one client as bytes [n, c, h, w] and their classes.

    Grey images have one channel, all others three. If `flat`, images may also lie in the folder
    itself, without a class: to be predicted.
    """
    try:
        import PIL  # noqa: F401 - to say what is missing before reading anything
    except ImportError:
        raise DataError(
            f"{folder.name}: images need pillow. Install it: pip install 'coterie[images]'."
        ) from None
    arrays, paths = [], []
    classes: list[str | None] = []
    refuse_links_out(folder, folder.iterdir())
    for kind in sorted(folder.iterdir()):
        if kind.name.startswith("."):
            continue
        if flat and not kind.is_dir() and kind.suffix.lower() in IMAGES:
            arrays.append(_read(kind, size))
            classes.append(None)
            paths.append(kind)
            continue
        if not kind.is_dir():
            raise DataError(
                f"{folder.name}/{kind.name}: images must lie in client/class/image folders. This "
                f"file has no class folder. Move or remove it."
            )
        refuse_links_out(folder, kind.iterdir())
        for path in sorted(kind.iterdir()):
            if path.name.startswith("."):
                continue
            if path.suffix.lower() not in IMAGES:
                raise DataError(
                    f"{folder.name}/{kind.name}/{path.name}: an image must end in "
                    f"{', '.join(IMAGES)}. Convert or remove it."
                )
            arrays.append(_read(path, size))
            classes.append(kind.name)
            paths.append(path)
    if not arrays:
        raise DataError(f"{folder.name}: a client must have an image. There is none. Remove it.")
    shape = arrays[0].shape[1:]
    for array, path in zip(arrays, paths, strict=True):
        if array.shape[1:] != shape:
            raise DataError(
                f"{folder.name}: all images must have one size. {_short(paths[0])} has "
                f"{_size(shape)}, {_short(path)} {_size(array.shape[1:])}. Give size=(height, "
                f"width) to scale them."
            )
    channels = max(len(array) for array in arrays)
    x = np.stack([np.broadcast_to(array, (channels, *shape)) for array in arrays])
    # Text also where the folders are called 0, 1, ...: a folder's name is no number to predict.
    labels = Cells("text", np.array(classes, dtype=object))
    files = [path.relative_to(folder).as_posix() for path in paths]
    beside = {"file": Cells("text", np.array(files, dtype=object))}
    return RawTable(folder.name, {"class": labels}, np.arange(len(x)), x=x, beside=beside)


def _read(path: Path, size: tuple[int, int] | None) -> np.ndarray:
    """One image as bytes [c, h, w]."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(path) as file:
            check_pixels(file.size, _short(path))
            image: Image.Image = file
            if image.mode.startswith("I;16"):  # sixteen bits: the upper eight
                image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
            grey = image.mode in ("1", "L", "LA", "I", "F")
            image = image.convert("L" if grey else "RGB")
            if size is not None:
                image = image.resize((size[1], size[0]), Image.Resampling.BILINEAR)
            array = np.asarray(image)
    except Image.DecompressionBombError:
        raise DataError(
            f"{_short(path)}: an image must have at most {PIXELS:,} pixels. It declares more than "
            f"twice as many. Scale it down or remove it."
        ) from None
    except (UnidentifiedImageError, OSError, ValueError, SyntaxError):
        raise DataError(
            f"{_short(path)}: a {path.suffix} file must hold an image. Its content is something "
            f"else, or damaged. Replace or remove it."
        ) from None
    return array[None] if array.ndim == 2 else array.transpose(2, 0, 1)


def _short(path: Path) -> str:
    return "/".join(path.parts[-3:])


def _size(shape: tuple[int, ...]) -> str:
    return f"{shape[0]}x{shape[1]}"
