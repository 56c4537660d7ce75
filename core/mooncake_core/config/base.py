"""What every configuration document has in common: strict fields, and errors that name file and path."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError

_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_]*)\)")


class ConfigError(Exception):
    """A configuration file that cannot be used; the message names the file, the field and what is wrong."""


class ConfigDocument(BaseModel):
    """Base of the documents that travel in ConfigMaps; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a JSON document; `$(NAME)` in its strings stands for the environment variable of that name.

        A container's arguments know such references, ConfigMaps do not, yet they carry paths too.

        Raises:
            ConfigError: the file cannot be read, is not JSON, a field is wrong or a variable is not set.
        """
        try:
            return cls.model_validate(_expanded(json.loads(path.read_text()), path))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path}: not UTF-8: {error}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise ConfigError(f"{path}: {where}: {first['msg']}") from error


def _expanded(value: Any, path: Path) -> Any:
    if isinstance(value, str):
        return _REFERENCE.sub(lambda reference: _variable(reference.group(1), path), value)
    if isinstance(value, list):
        return [_expanded(item, path) for item in value]
    if isinstance(value, dict):
        return {key: _expanded(item, path) for key, item in value.items()}
    return value


def _variable(name: str, path: Path) -> str:
    try:
        return os.environ[name]
    except KeyError:
        raise ConfigError(f"{path}: $({name}): this environment variable is not set") from None
