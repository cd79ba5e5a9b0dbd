"""Refuses a hub id that cannot be loaded, before transformers tries for half a minute. Does not import torch."""

from __future__ import annotations

import importlib
import os
import pathlib
import re
import urllib.error
import urllib.request

from planner.errors import WorkloadError

_HUB_ID = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_SECONDS = 2
"""Time in which the hub has to refuse a connection. A slow connection is left to transformers."""


def refuse_unreachable(model: str) -> None:
    """Refuse a hub id if it is not in the cache of this machine, and the hub cannot be reached.

    Raises:
        WorkloadError: `model` is no file or folder, and cannot be loaded from the hub; the message says why.
    """
    path = pathlib.Path(model)
    is_hub_id = _HUB_ID.fullmatch(model) is not None and path.suffix.lower() not in (".json", ".py") and model[0] != "."
    if os.path.exists(path) or not is_hub_id:
        return
    try:
        constants = importlib.import_module("huggingface_hub.constants")
    except ImportError:
        return  # transformers is not installed either, and the error for that says so
    if (pathlib.Path(constants.HF_HUB_CACHE) / f"models--{model.replace('/', '--')}").exists():
        return
    why = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _unreachable(constants.ENDPOINT)
    if why is not None:
        raise WorkloadError(
            f"model '{model}' is not a file or folder in {pathlib.Path.cwd()}, and cannot be loaded from the hub: "
            f"{why}, and this machine's cache does not have it; give the path of a config.json or of a model folder"
        )


def _unreachable(url: str) -> str | None:
    """Returns why a server cannot be reached; None if it answers, or takes its time."""
    try:
        with urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=_SECONDS):
            return None
    except urllib.error.HTTPError:
        return None  # an answer, too
    except urllib.error.URLError as error:
        return None if isinstance(error.reason, TimeoutError) else f"{url} cannot be reached ({error.reason})"
    except TimeoutError:
        return None
