"""What every configuration document has in common: strict fields, and errors that name file and path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError


class ConfigError(Exception):
    """A configuration file that cannot be used; the message names the file, the field and what is wrong."""


class ConfigDocument(BaseModel):
    """Base of the documents that travel in ConfigMaps; unknown fields are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read a JSON document.

        Raises:
            ConfigError: the file cannot be read, is not JSON, or a field is wrong.
        """
        try:
            return cls.model_validate(json.loads(path.read_text()))
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from error
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg}") from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "document"
            raise ConfigError(f"{path}: {where}: {first['msg']}") from error
