"""How one operator process is set up: environment variables, all with a default."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mooncake_operator.planning import Images

PREFIX = "MOONCAKE_OPERATOR_"
_NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")

PortNumber = Annotated[int, Field(ge=0, le=65535)]
Seconds = Annotated[float, Field(gt=0)]


class SettingsError(Exception):
    """A variable cannot be used; names it and says what to write."""


class Settings(BaseModel):
    """Each field is read from `MOONCAKE_OPERATOR_<FIELD>`."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    namespaces: tuple[str, ...] = ()
    """Namespaces to look after, separated by commas; empty = all."""
    scan: bool = True
    """Notice CRDs and namespaces that come later (needs to list and watch both)."""
    image: str = Images().mooncake
    """Image of scheduler, sidecar, simulated engine and store."""
    redis_image: str = Images().redis
    redis_user: Annotated[int, Field(ge=1)] | None = Images().redis_user
    """Uid of the managed Redis; empty = the platform gives one, as OpenShift does and insists on."""
    lease: bool = True
    """Be one of several; without it this process acts at once."""
    lease_namespace: str = ""
    """Where the Lease lies; empty = the Pod's own namespace, or `default`."""
    lease_name: str = "mooncake-operator"
    lease_duration_seconds: Seconds = 15.0
    identity: str = ""
    """Name among the candidates; empty = host name and process id."""
    workers: Annotated[int, Field(ge=1, le=64)] = 16
    resync_seconds: Seconds = 300.0
    rest_seconds: Annotated[float, Field(ge=0)] = 0.1
    """How long a cluster rests between two passes, so that a burst of events is one pass."""
    backoff_seconds: Seconds = 0.2
    backoff_max_seconds: Seconds = 300.0
    listen: str = "0.0.0.0"
    metrics_port: PortNumber = 8080
    health_port: PortNumber = 8081
    watch_timeout_seconds: Annotated[int, Field(ge=1)] = 600
    watch_inactivity_seconds: Seconds = 70.0
    measure_seconds: Annotated[float, Field(ge=0)] = 60.0
    """How long a measurement (TTFT, TBT, SLOMet, a store's level) stands in a status at least."""
    stop_seconds: Seconds = 20.0
    """How long passes may go on once the process is asked to stop."""
    log_level: str = "INFO"

    @field_validator("namespaces", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return tuple(filter(None, value.replace(",", " ").split())) if isinstance(value, str) else value

    @field_validator("redis_user", mode="before")
    @classmethod
    def _none(cls, value: Any) -> Any:
        return None if value == "" else value

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, value: str) -> str:
        if value.upper() not in ("DEBUG", "INFO", "WARNING", "ERROR"):
            raise ValueError("write DEBUG, INFO, WARNING or ERROR")
        return value.upper()

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Read the variables.

        Raises:
            SettingsError: one is unknown or unusable.
        """
        given = {
            name.removeprefix(PREFIX).lower(): value
            for name, value in environment.items()
            if name.startswith(PREFIX)
        }
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            lines = [
                f"{PREFIX}{'_'.join(map(str, e['loc'])).upper()}: {_said(e['type'], e['msg'])}"
                for e in error.errors()
            ]
            raise SettingsError("; ".join(lines)) from error

    @property
    def images(self) -> Images:
        """Images of what the operator renders."""
        return Images(mooncake=self.image, redis=self.redis_image, redis_user=self.redis_user)

    def own_namespace(self) -> str:
        """Namespace of the Lease."""
        if self.lease_namespace:
            return self.lease_namespace
        return _NAMESPACE_FILE.read_text().strip() if _NAMESPACE_FILE.exists() else "default"

    def own_identity(self) -> str:
        """Name among the candidates: of two processes at a time never the same."""
        return self.identity or f"{socket.gethostname()}-{os.getpid()}"


def _said(error_type: str, message: str) -> str:
    known = ", ".join(f"{PREFIX}{field.upper()}" for field in Settings.model_fields)
    return f"no such setting; known are {known}" if error_type == "extra_forbidden" else message
