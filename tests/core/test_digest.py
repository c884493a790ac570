"""SHA-256 without OpenSSL is SHA-256."""

from __future__ import annotations

import hashlib
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from orchard.core.digest import sha256


@given(st.binary(max_size=300))
def test_the_same_bytes(data: bytes) -> None:
    assert sha256(data) == hashlib.sha256(data).digest()


def test_openssl_stays_out() -> None:
    code = "import sys; from orchard.core.digest import sha256; sha256(b''); print('_hashlib' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
