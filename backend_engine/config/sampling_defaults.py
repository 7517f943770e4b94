"""``SamplingDefaults``: what a model's generation_config.json recommends for requests that do not say.

Made by ``checkpoint/hf_folder`` when ``generation_config`` is ``model``, empty otherwise; applied when a request is
admitted. What a request sets always wins.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from backend_engine.config.sampling_params import SamplingParams
from backend_engine.errors import InvalidRequestError, ModelLoadError

GENERATION_CONFIGS = ("ignore", "model")
_ALWAYS = ("repetition_penalty",)
_WHEN_SAMPLING = ("temperature", "top_k", "top_p", "min_p")


@dataclass(frozen=True)
class SamplingDefaults:
    """Values for the fields of ``SamplingParams`` of these names that a request leaves unset; ``None`` = nothing."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> "SamplingDefaults":
        """From the keys of generation_config.json, read as transformers' ``generate`` reads them.

        How long an answer may get is the request's to say. Without ``do_sample`` the model is greedy, and temperature,
        top_k, top_p and min_p mean nothing; with it an unstated temperature is 1. ``ModelLoadError`` names ``where``,
        the key and what is allowed.
        """
        do_sample = values.get("do_sample")
        if do_sample not in (None, True, False) or isinstance(do_sample, int | float) != isinstance(do_sample, bool):
            raise ModelLoadError(f"{where}: do_sample is {do_sample!r}; expected true or false")
        found: dict[str, Any] = {}
        for key in (*_ALWAYS, *_WHEN_SAMPLING):
            if values.get(key) is None:
                continue
            try:
                checked = getattr(SamplingParams(**{key: values[key]}), key)
            except InvalidRequestError as error:
                raise ModelLoadError(f"{where}: {error}") from None
            if key in _ALWAYS or do_sample:
                found[key] = checked
        if do_sample:
            found.setdefault("temperature", 1.0)
        return cls(**found)

    def fill(self, params: SamplingParams) -> SamplingParams:
        """``params`` with these values where it says nothing; itself when there is nothing to fill in."""
        unset = {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(params, field.name) is None and getattr(self, field.name) is not None
        }
        return dataclasses.replace(params, **unset) if unset else params
