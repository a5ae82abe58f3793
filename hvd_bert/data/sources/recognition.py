"""What the bytes of a data file are. Content that is not data gets a message that names it and the remedy."""

from __future__ import annotations

import codecs
import gzip
import io
import re
import zlib

from hvd_bert.errors import UserError, reason_of

_GZIP = b"\x1f\x8b"
_ARCHIVES = {
    _GZIP: "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"PK\x03\x04": "zip",
    b"\x28\xb5\x2f\xfd": "zstd",
    b"7z\xbc\xaf\x27\x1c": "7z",
}
_PARQUET = b"PAR1"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
# Marks at the start, and which of the first four bytes of ASCII text are not 0. UTF-32's little-endian mark starts with
# UTF-16's.
_WIDE_ENCODINGS = {
    "UTF-32": (codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE, b"\1\0\0\0", b"\0\0\0\1"),
    "UTF-16": (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE, b"\1\0\1\0", b"\0\1\0\1"),
}
_PYTHON_REPR = re.compile(r"[\[({\s]*[\[({]\s*'")  # Python quotes keys with ', JSON with "
# Compressed text shrinks to a tenth, and to a hundredth where rows repeat their contexts.
_MAX_EXPANSION, _ALWAYS_ALLOWED = 300, 2**26


def unpacked(name: str, content: bytes) -> bytes:
    """The content, decompressed if it is gzip. Raises UserError for other archives and for a damaged one."""
    if content.startswith(_GZIP):
        limit = expansion_limit(len(content))
        try:
            with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
                content = file.read(limit + 1)
        except (OSError, EOFError, zlib.error) as error:
            raise UserError(f"{name}: damaged gzip file ({reason_of(error)}). Copy or download it again.") from error
        check_expansion(name, len(content), limit)
    for magic, archive in _ARCHIVES.items():
        if content.startswith(magic):
            raise UserError(f"{name}: compressed with {archive}. Decompress the file first.")
    return content


def expansion_limit(size: int) -> int:
    """How many bytes a compressed file of this size may expand to."""
    return _MAX_EXPANSION * size + _ALWAYS_ALLOWED


def check_expansion(name: str, expanded: int, limit: int) -> None:
    """Raise UserError for more than `expansion_limit` bytes."""
    if expanded > limit:
        raise UserError(
            f"{name}: expands to more than {_MAX_EXPANSION} times its size, which is not plausible for data. Give a"
            " file in which rows are not repeated, or write it as JSON Lines."
        )


def is_parquet(content: bytes) -> bool:
    """Whether the bytes are a Parquet file."""
    return content.startswith(_PARQUET)


def decoded(name: str, content: bytes) -> str:
    """The text of a file. Raises UserError if it is no text in UTF-8, or a pointer or a page in place of data."""
    if content.startswith(_LFS_POINTER):
        raise UserError(f"{name}: a git-LFS pointer, not the data. Run git lfs pull in its repository.")
    for encoding, (*marks, little, big) in _WIDE_ENCODINGS.items():
        if content.startswith(tuple(marks)) or bytes(map(bool, content[:4])) in (little, big):
            raise UserError(f"{name}: {encoding} text. Convert it: iconv -f {encoding} -t UTF-8 {name} > NEW_FILE")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text (byte {error.start}). Save it as UTF-8.") from error
    if not text.strip():
        raise UserError(f"{name}: the file is empty. Give a file with data.")
    if text[:1000].lstrip().startswith("<"):
        raise UserError(
            f"{name}: an HTML or XML page, not the data; often a login or an error page. Download the file itself (its"
            ' "raw" link).'
        )
    return text


def check_not_python(name: str, text: str) -> None:
    """Raise UserError if text that is not JSON was printed by Python."""
    if _PYTHON_REPR.match(text[:1000]):
        raise UserError(f"{name}: a Python repr, not JSON: its keys are in single quotes. Write it with json.dump.")
