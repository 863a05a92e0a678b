"""Keys that signatures are made and verified with.

model_signing takes elliptic curve keys only, and fails on others without a reason.
"""

import functools

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from stagepack.errors import OptionError

# P-256, P-384 and P-521, as cryptography names them.
_CURVES = frozenset({"secp256r1", "secp384r1", "secp521r1"})


def check_key(path: str, content: bytes) -> None:
    """Refuse a key of another kind than elliptic curves. What is no key, or is encrypted, is left to model_signing."""
    for load_key in (load_pem_public_key, functools.partial(load_pem_private_key, password=None)):
        try:
            key = load_key(content)
        except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it is encrypted
            continue
        if isinstance(key, ec.EllipticCurvePrivateKey | ec.EllipticCurvePublicKey):
            kind = key.curve.name
        else:
            kind = type(key).__name__.removesuffix("PrivateKey").removesuffix("PublicKey")
        if kind not in _CURVES:
            raise OptionError(
                f"{path}: expected an elliptic curve key of P-256, P-384 or P-521, found {kind}: make one with "
                "'openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256'"
            )
