"""Programs that train by their own loop and read a config. Each module knows how its program prepares a model."""

from planner.plan_types.words import ProgramName
from planner.workload.programs.axolotl import Axolotl
from planner.workload.programs.llama_factory import LlamaFactory
from planner.workload.programs.program import Program

PROGRAMS: dict[ProgramName, Program] = {"axolotl": Axolotl(), "llama-factory": LlamaFactory()}
"""The programs by the name that `--for` takes."""
