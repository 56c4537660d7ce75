"""What the machine must have besides the programs that are built: Debian's packages."""

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from e2e.cluster.errors import ClusterError
from e2e.cluster.programs import Say

PACKAGES: Mapping[str, str] = {
    "etcd": "etcd-server",
    "runc": "runc",
    "iptables": "iptables",
    "nft": "nftables",
    "conntrack": "conntrack",
    "socat": "socat",
    "ip": "iproute2",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "mount": "mount",
    "sysctl": "procps",
    "cc": "gcc",
    "mmdebstrap": "mmdebstrap",
    "buildah": "buildah",
}
"""Program → package."""

CNI_DIR = Path("/usr/lib/cni")
_FILES: Mapping[Path, str] = {
    CNI_DIR / "bridge": "containernetworking-plugins",
    Path("/usr/include/unistd.h"): "libc6-dev",
}


def provide(say: Say) -> None:
    """Install what is missing.

    Raises:
        ClusterError: this is no Debian, not root, or apt failed; the message names the packages.
    """
    missing = sorted({package for program, package in PACKAGES.items() if shutil.which(program) is None})
    missing += [package for file, package in _FILES.items() if not file.exists()]
    if not missing:
        return
    names = " ".join(missing)
    apt = shutil.which("apt-get")
    if apt is None or os.geteuid() != 0:
        raise ClusterError(
            f"missing on this machine: install these packages (or run as root on Debian): {names}"
        )
    say(f"installing {names}")
    # Run level 1 keeps the packages from starting services of their own: etcd would sit on 2379.
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive", "RUNLEVEL": "1"}
    install = [apt, "install", "-y", "-qq", "--no-install-recommends", *missing]
    if subprocess.run(install, env=environment, capture_output=True, check=False).returncode:
        subprocess.run([apt, "update", "-qq"], env=environment, capture_output=True, check=False)
        ran = subprocess.run(install, env=environment, capture_output=True, text=True, check=False)
        if ran.returncode:
            raise ClusterError(f"apt-get could not install {names}:\n{(ran.stdout + ran.stderr)[-3000:]}")
