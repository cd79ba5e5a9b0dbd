"""Environment of a measurement: the card, its driver, and all versions that can change a figure."""

from __future__ import annotations

import datetime
import json
import os
import pathlib
import sys

import torch

from planner.assemble import versions
from planner.profiles.finding import UNLISTED
from planner.profiles.process_memory import driver_version
from planner.workload.cards import GENERIC, resolve_card

_SETTINGS = (
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_MODULE_LOADING",
    "TORCH_CUDNN_SDPA_DEPRIORITIZED",
)


def software() -> dict[str, object]:
    """Returns the date and the versions. Needs no card."""
    return {
        "date": datetime.date.today().isoformat(),
        **versions(),
        "cuda": torch.version.cuda,
        "settings": {name: os.environ[name] for name in _SETTINGS if name in os.environ},
    }


def hardware() -> dict[str, object]:
    """Returns the facts of the first card. Starts CUDA in this process."""
    facts = torch.cuda.get_device_properties(0)
    return {
        "cuda_name": torch.cuda.get_device_name(0),
        "vram_bytes": facts.total_memory,
        "driver": driver_version(),
        "cudnn": torch.backends.cudnn.version(),
    }


def card_name(gpu: str | None) -> str:
    """Returns the profile to predict for: the one named, or that of this machine's card."""
    if gpu is not None and gpu.endswith(".toml"):
        return str(pathlib.Path(gpu).resolve())
    name = gpu or resolve_card(None, None).name
    if name in (GENERIC, UNLISTED):
        raise SystemExit("no CUDA card with a profile is here: name one, such as --gpu h100")
    return name


def main() -> None:
    """Print the environment as one line of JSON; with --card only the name of the card's profile, or 'generic'."""
    if "--card" in sys.argv[1:]:
        print(resolve_card(None, None).name)
        return
    print(json.dumps({**software(), **(hardware() if torch.cuda.is_available() else {})}))


if __name__ == "__main__":
    main()
