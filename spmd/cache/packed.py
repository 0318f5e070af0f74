"""JSON as bytes that one rank sends to the others, with a hash of them."""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any

_LENGTH = hashlib.sha256().digest_size


def packed(data: Any) -> bytes:
    """``data`` as bytes: a hash, then the text, compressed."""
    content = zlib.compress(as_bytes(data), 1)
    return hashlib.sha256(content).digest() + content


def unpacked(content: bytes) -> Any:
    """The data of ``packed``. Raises ``ValueError`` for other bytes."""
    digest, content = content[:_LENGTH], content[_LENGTH:]
    if hashlib.sha256(content).digest() != digest:
        raise ValueError("what another rank sent has changed on the way")
    return json.loads(zlib.decompress(content))


def as_bytes(data: Any) -> bytes:
    """The text of ``data``."""
    return json.dumps(data, separators=(",", ":")).encode()
