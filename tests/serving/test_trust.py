"""Native code in models: allowed, signed, refused."""
from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest
import tensorflow as tf

from tests.serving import support
from tests.serving.support import host
from tf_stitch import cli, saved_model, signing
from tf_stitch.backend.host import find_compiler

REQUEST = '{"inputs": [1, 2, 3]}'
KERNELS, FALLBACK = [7, 11, 15], [-1, -1, -1]


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """Two private keys; their public keys lie beside them."""
    support.build()
    folder = tmp_path_factory.mktemp("keys")
    for name in ("ours", "theirs"):
        assert cli.main(["sign", "--new-key", str(folder / name), "-q"]) == 0
    return folder


@pytest.fixture(scope="module")
def unsigned(tmp_path_factory):
    return support.marked_model(tmp_path_factory.mktemp("unsigned") / "1")


@pytest.fixture(scope="module")
def signed(keys, unsigned):
    folder = keys / "model"
    shutil.copytree(unsigned, folder)
    assert cli.main(["sign", str(folder), "--key", str(keys / "ours"), "-q"]) == 0
    return folder


def serve(model, **env):
    """(outputs, lines of warning) of a request under an environment."""
    done = host("run", model, "-", stdin=REQUEST, env={"TF_CPP_MIN_LOG_LEVEL": "1", **env})
    return json.loads(done.stdout)["outputs"]["y"], [line for line in done.stderr.splitlines() if "tf_stitch" in line]


def test_any_is_the_default(unsigned, signed):
    for env in ({}, {"TF_STITCH_ALLOW": "any"}):
        assert serve(unsigned, **env) == (KERNELS, [])
    assert serve(signed) == (KERNELS, [])


@pytest.mark.parametrize("allow, says", [("none", "TF_STITCH_ALLOW=none"), ("maybe", "none of any, signed and none"),
                                         ("signed", "needs TF_STITCH_KEYS")])
def test_refused(signed, allow, says):
    outputs, warnings = serve(signed, TF_STITCH_ALLOW=allow)
    assert outputs == FALLBACK
    assert len(warnings) == 1 and says in warnings[0] and "TensorFlow's operations run" in warnings[0]


def test_signed(keys, unsigned, signed):
    both = keys / "both.pem"
    both.write_bytes(b"# ours and theirs\n" + (keys / "theirs.pub").read_bytes() + (keys / "ours.pub").read_bytes())
    for file in (keys / "ours.pub", both):
        assert serve(signed, TF_STITCH_ALLOW="signed", TF_STITCH_KEYS=str(file)) == (KERNELS, [])
    for model, file, says in ((unsigned, keys / "ours.pub", "not signed"), (signed, keys / "theirs.pub", "no key in"),
                              (signed, keys / "ours", "no Ed25519 public key"), (signed, keys / "no", "readable file")):
        outputs, warnings = serve(model, TF_STITCH_ALLOW="signed", TF_STITCH_KEYS=str(file))
        assert outputs == FALLBACK and len(warnings) == 1 and says in warnings[0]


def test_changed_after_signing(keys, signed, tmp_path):
    shutil.copytree(signed, tmp_path / "1")
    model = saved_model.read(tmp_path / "1")
    for node in saved_model.stitched_nodes(model):
        node.attr["program"].s = node.attr["program"].s.replace(b"by_hand", b"BY_HAND")
    (tmp_path / "1" / saved_model.MODEL).write_bytes(model.SerializeToString())
    outputs, warnings = serve(tmp_path / "1", TF_STITCH_ALLOW="signed", TF_STITCH_KEYS=str(keys / "ours.pub"))
    assert outputs == FALLBACK and "no key in" in warnings[0]
    with pytest.raises(signing.SigningError, match="or was changed"):
        signing.check_saved_model(tmp_path / "1", keys / "ours.pub")


def test_signing_and_checking(keys, unsigned, signed, capsys, tmp_path):
    assert stat.S_IMODE((keys / "ours").stat().st_mode) == 0o600
    assert cli.main(["sign", str(signed), "--check", str(keys / "ours.pub")]) == 0
    assert "all 1 stitched ops" in capsys.readouterr().out
    plain = tmp_path / "plain"
    tf.saved_model.save(tf.Module(), str(plain))
    for args, says in ((["sign", str(unsigned), "--check", str(keys / "ours.pub")], "is not signed"),
                       (["sign", str(signed), "--check", str(keys / "theirs.pub")], "none of these keys"),
                       (["sign", str(signed), "--key", str(keys / "ours.pub")], "no Ed25519 private key"),
                       (["sign", str(signed), "--key", str(keys / "no")], "cannot be read"),
                       (["sign", str(plain), "--key", str(keys / "ours")], "nothing to sign"),
                       (["sign", "--new-key", str(keys / "ours")], "File exists"),
                       (["sign"], "--new-key"), (["sign", str(signed)], "--check")):
        assert cli.main(args) == 1
        assert says in capsys.readouterr().err
    assert sorted(os.listdir(signed)) == sorted(os.listdir(unsigned))


def test_built_against_boringssl(tmp_path):
    """As Bazel builds it: with BoringSSL's header there is no weak symbol."""
    headers = next(iter(Path(tf.sysconfig.get_include()).glob("external/boringssl/src/include")), None)
    if headers is None:
        pytest.skip("TensorFlow's headers here are without BoringSSL's")
    subprocess.run([*find_compiler(), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", "-isystem", str(headers),
                    "-c", str(support.ROOT / "custom_ops/ed25519.cc"), "-o", str(tmp_path / "ed25519.o")], check=True)
    symbols = subprocess.run(["nm", "-u", tmp_path / "ed25519.o"], capture_output=True, text=True, check=True).stdout
    assert "U ED25519_verify" in symbols


def test_libcrypto_where_tensorflow_has_no_boringssl(keys, tmp_path):
    binary = tmp_path / "verify"
    sources = [support.ROOT / "tests/serving/verify_main.cc", support.ROOT / "custom_ops/ed25519.cc"]
    subprocess.run([*find_compiler(), "-std=c++17", "-O1", "-Wall", "-Wextra", "-Werror", *map(str, sources), "-o",
                    str(binary), "-ldl"], check=True)
    message = tmp_path / "message"
    message.write_bytes(bytes(range(256)) * 50)
    signature = tmp_path / "signature"
    signature.write_bytes(signing._private(keys / "ours").sign(message.read_bytes()))
    both = tmp_path / "both.pem"
    both.write_bytes((keys / "theirs.pub").read_bytes() + (keys / "ours.pub").read_bytes())

    def verify() -> str:
        return subprocess.run([binary, both, message, signature], capture_output=True, text=True, check=True).stdout

    first = verify()
    if "no library" in first:
        pytest.skip("no libcrypto here")
    assert first.split() == ["2", "1"]
    message.write_bytes(message.read_bytes()[1:])
    assert verify().split() == ["2", "0"]
    signature.write_bytes(b"short")
    assert verify().split() == ["2", "0"]
