"""The optional dependencies of stagepack: which extra provides a package that is not installed."""

import contextlib
import importlib.util
from collections.abc import Iterator

from stagepack.errors import MissingPackageError

# Top-level module -> the extras of ``pyproject.toml`` that install it by themselves, first the one to name.
_EXTRAS = {
    "OpenSSL": ("sign",),
    "aiohttp": ("remote",),
    "cryptography": ("sign",),
    "fsspec": ("remote",),
    "google": ("serve", "triton"),
    "grpc": ("serve", "triton"),
    "grpc_health": ("serve",),
    "grpc_reflection": ("serve",),
    "huggingface_hub": ("remote",),
    "h11": ("serve",),
    "jinja2": ("serve",),
    "llguidance": ("structured",),
    "ml_dtypes": ("onnxruntime",),
    "model_signing": ("sign",),
    "onnx": ("onnx",),
    "onnx_ir": ("onnx",),
    "onnxruntime": ("onnxruntime",),
    "onnxscript": ("onnx",),
    "prometheus_client": ("serve",),
    "ray": ("ray",),
    "s3fs": ("remote",),
    "sentence_transformers": ("sentence-transformers",),
    "starlette": ("serve",),
    "sympy": ("torch",),
    "torch": ("torch",),
    "transformers": ("hf",),
    "tokenizers": ("serve",),
    "tritonclient": ("serve", "triton"),
    "uvicorn": ("serve",),
    "uvloop": ("serve",),
}


@contextlib.contextmanager
def explain_missing_packages(extra: str | None = None) -> Iterator[None]:
    """Raise `MissingPackageError` in the place of a ``ModuleNotFoundError`` of a package that an extra of stagepack installs.

    extra: the extra that installs all that the ``with`` block imports. By default, the one that installs the missing package.
    """
    try:
        yield
    except MissingPackageError:
        raise
    except ModuleNotFoundError as error:
        message = missing_package_message(error, extra)
        if message is None:
            raise
        raise MissingPackageError(message, name=error.name, path=error.path) from error


def require_extras(*extras: str) -> None:
    """Refuse a call that needs several extras of which more than one is missing: all of them at once, before any work.

    A single missing one is told when it is imported, with the name of its package.
    """
    missing = {
        extra: [module for module, its_extras in _EXTRAS.items() if extra in its_extras and not _is_found(module)]
        for extra in dict.fromkeys(extras)
    }
    missing = {extra: modules for extra, modules in missing.items() if modules}
    if len(missing) > 1:
        packages = ", ".join(repr(module) for modules in missing.values() for module in modules)
        names = ",".join(missing)
        raise MissingPackageError(
            f"the packages {packages} are not installed: the extras {names} of stagepack (in a checkout: pip install '.[{names}]') install "
            "them",
            name=next(iter(missing.values()))[0],
        )


def _is_found(module_name: str) -> bool:
    try:
        return importlib.util.find_spec(module_name) is not None
    except (ImportError, ValueError):  # a name that is None in sys.modules
        return False


def missing_package_message(error: ModuleNotFoundError, extra: str | None = None) -> str | None:
    """Say which extra of stagepack installs the module that was not found; None if none does."""
    module_name = error.name or ""
    extras = _EXTRAS.get(module_name.partition(".")[0])
    if extras is None:
        return None
    return f"the package {module_name!r} is not installed: {install_command(extra or extras[0])} installs it"


def install_command(extra: str) -> str:
    """Return what installs packages: the extra of stagepack, and the command for it in a checkout."""
    return f"the extra {extra!r} of stagepack (in a checkout: pip install '.[{extra}]')"
