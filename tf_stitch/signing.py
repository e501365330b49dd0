"""Signs the native code inside rewritten models, and checks signatures: Ed25519 (RFC 8032), keys in PEM files.

A rewritten model holds machine code.  Where ``TF_STITCH_ALLOW=signed`` is set, the op runs it only when a key in the
file that ``TF_STITCH_KEYS`` names has signed it (custom_ops/trust.cc).  What is signed is each node's program, behind
the text ``DOMAIN``; weights and the rest of the graph are not covered.
"""
from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

from .errors import StitchError

DOMAIN = b"tf_stitch program\0"
ATTR = "_tf_stitch_signature"


class SigningError(StitchError):
    """A key or a model cannot be used for signing, or a signature is wrong."""


def new_key(path: str | os.PathLike[str]) -> Path:
    """Writes a new private key to ``path`` (readable by its owner only) and its public key to ``path`` + ".pub".

    Returns the public key's path.  Raises SigningError when a file exists or cannot be written.
    """
    serialization, ed25519 = _crypto()
    key = ed25519.Ed25519PrivateKey.generate()
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                serialization.NoEncryption())
    public = key.public_key().public_bytes(serialization.Encoding.PEM,
                                           serialization.PublicFormat.SubjectPublicKeyInfo)
    goal = Path(f"{os.fspath(path)}.pub")
    try:
        for name, data, mode in ((Path(path), private, 0o600), (goal, public, 0o644)):
            with os.fdopen(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as f:
                f.write(data)
    except OSError as error:
        raise SigningError(f"The key '{error.filename}' cannot be written: {error.strerror}.") from None
    return goal


def sign_saved_model(folder: str | os.PathLike[str], key: str | os.PathLike[str]) -> int:
    """Signs every stitched op of a SavedModel in place; returns how many there are.

    ``key``: a private key as :func:`new_key` writes it.  Raises SigningError, or SavedModelError for the folder.
    """
    from .saved_model import FINGERPRINT, MODEL, _disk_errors, _fingerprint, read, stitched_nodes

    private = _private(Path(key))
    path = Path(folder)
    model = read(path)
    count = 0
    for node in stitched_nodes(model):
        node.attr[ATTR].s = private.sign(DOMAIN + node.attr["program"].s)
        count += 1
    if not count:
        raise SigningError(f"'{path}' holds no stitched op, so there is nothing to sign; give a rewritten model.")
    with _disk_errors(path):
        with tempfile.NamedTemporaryFile(dir=path, prefix=".sign.", delete=False) as f:
            f.write(model.SerializeToString(deterministic=True))
            f.flush()
            os.fsync(f.fileno())
        os.chmod(f.name, (path / MODEL).stat().st_mode & 0o777)
        os.replace(f.name, path / MODEL)
        if (path / FINGERPRINT).exists():
            _fingerprint(path)
    return count


def check_saved_model(folder: str | os.PathLike[str], keys: str | os.PathLike[str]) -> int:
    """Checks that a key of the PEM file ``keys`` signed every stitched op; returns how many there are.

    Raises SigningError that names the first op that is not signed so.
    """
    from .saved_model import read, stitched_nodes

    public = _public(Path(keys))
    nodes = list(stitched_nodes(read(Path(folder))))
    for node in nodes:
        if ATTR not in node.attr or not _signed(node, public):
            said = "signed by none of these keys, or was changed" if ATTR in node.attr else "not signed"
            raise SigningError(f"The stitched op '{node.name}' of '{folder}' is {said}.")
    return len(nodes)


def _signed(node: Any, keys: list[Any]) -> bool:
    from cryptography.exceptions import InvalidSignature

    for key in keys:
        try:
            key.verify(node.attr[ATTR].s, DOMAIN + node.attr["program"].s)
            return True
        except InvalidSignature:
            continue
    return False


def _crypto() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ImportError:
        raise SigningError("Signing needs the package 'cryptography': pip install cryptography.") from None
    return serialization, ed25519


def _private(path: Path) -> Any:
    serialization, ed25519 = _crypto()
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except OSError as error:
        raise SigningError(f"The key '{path}' cannot be read: {error.strerror}.") from None
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ed25519.Ed25519PrivateKey):
        raise SigningError(f"'{path}' is no Ed25519 private key without a password; make one with "
                           "'tf-stitch sign --new-key FILE'.")
    return key


def _public(path: Path) -> list[Any]:
    """The Ed25519 keys of a file; other keys are left out, as the op does."""
    serialization, ed25519 = _crypto()
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SigningError(f"The keys '{path}' cannot be read: {error.strerror}.") from None
    end = b"-----END PUBLIC KEY-----"
    keys = []
    for block in text.split(end)[:-1]:
        begin = block.rfind(b"-----BEGIN PUBLIC KEY-----")
        try:
            keys.append(serialization.load_pem_public_key(block[begin:] + end))
        except ValueError:
            continue
    found = [k for k in keys if isinstance(k, ed25519.Ed25519PublicKey)]
    if not found:
        raise SigningError(f"'{path}' holds no Ed25519 public key (PEM).")
    return found
