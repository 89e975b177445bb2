"""Images from bytes: format and size are read from the header first, pixels only if both can be taken. Any thread."""

import io
import warnings
from typing import Any

import numpy as np

from mlx_parallm.errors import InvalidRequestError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
MAX_PIXELS = 50_000_000
MAX_SIDE = 20_000


def decode(data: bytes) -> Any:
    """(height, width, 3), uint8: the first frame, turned as its EXIF data says, without transparency."""
    from PIL import Image, ImageOps, UnidentifiedImageError

    if not data:
        raise InvalidRequestError("the image is empty")
    if _is_svg(data):
        raise InvalidRequestError(f"SVG is no image of pixels: send {', '.join(FORMATS)}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow's about large images: there is a limit below, and it is lower
            with Image.open(io.BytesIO(data), formats=FORMATS) as image:
                _check_size(*image.size)
                return np.asarray(ImageOps.exif_transpose(image).convert("RGB"))
    except Image.DecompressionBombError:
        raise InvalidRequestError(f"the image has more than {MAX_PIXELS:,} pixels") from None
    except UnidentifiedImageError:
        raise InvalidRequestError(f"the image is of no known format, or damaged: send {', '.join(FORMATS)}") from None
    except InvalidRequestError:
        raise
    except Exception as error:  # decoders raise what they will: SyntaxError, struct.error, EOFError, …
        raise InvalidRequestError(f"the image is damaged: {str(error) or type(error).__name__}") from error


def _check_size(width: int, height: int) -> None:
    if width < 1 or height < 1 or max(width, height) > MAX_SIDE or width * height > MAX_PIXELS:
        raise InvalidRequestError(
            f"the image has {width} × {height} pixels; at most {MAX_PIXELS:,} are taken, and {MAX_SIDE:,} on a side"
        )


def _is_svg(data: bytes) -> bool:
    start = data[:1024].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    return start.startswith((b"<svg", b"<?xml", b"<!doctype svg")) or b"<svg" in start
