"""What KV travels over, and the memory it is registered from."""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, ClassVar, Literal

from pydantic import Field, StringConstraints

from mooncake_core.api.base import ApiModel, Rule, Write
from mooncake_core.api.scalars import QUANTITY_PATTERN, ObjectName, alike, quantity
from mooncake_core.api.support import not_yet, not_yet_value

AutoOrQuantity = Annotated[
    str,
    StringConstraints(pattern=f"^auto$|{QUANTITY_PATTERN}", max_length=32),
    alike(lambda text: Decimal(-1) if text == "auto" else quantity(text)),
    Write('auto, or a quantity as text, e.g. "16Gi"'),
]

_TCP_ONLY = "only protocol TCP runs today: leave it out"


class NetworkResource(ApiModel):
    """A device plugin's resource that gives a Pod its NICs."""

    name: ObjectName
    count: Annotated[int, Field(ge=1, le=64), Write("a number, e.g. 1")] = 1
    semantics: Literal["Slot", "PerNic"] = "Slot"


class Gid(ApiModel):
    """Which GID of a RoCE port is used."""

    index: Annotated[int, Field(ge=0, le=255), Write("auto, or a number from 0 to 255")] | Literal["auto"] = (
        "auto"
    )
    family: Literal["IPv4", "IPv6"] = "IPv4"


class Mtu(ApiModel):
    """MTU of the path between NICs."""

    path: Literal[512, 1024, 2048, 4096]


class NetworkSpec(ApiModel):
    """How instances reach each other with KV."""

    protocol: Literal["TCP", "RDMA"] = "TCP"
    fallback: Literal["Fail", "TCP"] = "Fail"
    """What happens where RDMA does not work: stop with an error, or go on over TCP."""
    mode: Literal["None", "DevicePlugin", "DRA", "HostNetwork"] = "None"
    resources: Annotated[list[NetworkResource], Field(max_length=16)] | None = None
    gid: Gid | None = None
    mtu: Mtu | None = None

    RULES: ClassVar[tuple[Rule, ...]] = (
        not_yet_value(
            "protocol", lambda n: n.protocol != "RDMA", "self.protocol != 'RDMA'", "RDMA", "write TCP"
        ),
        not_yet_value(
            "fallback", lambda n: n.fallback == "Fail", "self.fallback == 'Fail'", "TCP", _TCP_ONLY
        ),
        not_yet_value(
            "mode", lambda n: n.mode == "None", "self.mode == 'None'", "any other mode than None", _TCP_ONLY
        ),
        not_yet("resources", "resources", _TCP_ONLY),
        not_yet("gid", "gid", _TCP_ONLY),
        not_yet("mtu", "mtu", _TCP_ONLY),
    )


class HugepagesSpec(ApiModel):
    """Huge pages of each Pod."""

    size: Literal["2Mi", "512Mi", "1Gi"]
    per_pod: AutoOrQuantity = "auto"
    """`auto`: worked out from what the Pod registers."""
