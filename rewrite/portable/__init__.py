"""Code that runs here and is also pasted, as text, into emitted files.

The emitter copies these functions with `inspect.getsource`, so the text a user reads in `train_step.py` is the text
that ran here. Three rules follow:

- The modules import torch, the standard library and each other only.
- Emitted functions have no type annotations: in a training script they would be noise. mypy therefore does not check
  their bodies (see the override in `pyproject.toml`).
- Their docstrings and comments are written for somebody who reads the emitted file and has never seen this project.

In a module with a line "the text that runs here is the text that is emitted", only what is below that line is pasted.
"""
