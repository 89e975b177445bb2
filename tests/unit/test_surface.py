"""Commands and options are what they were; `tests/surface.py` says how to change them."""

from mlx_parallm.cli.main import command_parser
from mlx_parallm.config import ServeConfig, TrainConfig
from tests import surface


def test_options() -> None:
    surface.check("serve", surface.options(ServeConfig))
    surface.check("train", surface.options(TrainConfig))


def test_commands() -> None:
    lines = surface.commands(command_parser(), "parallm")
    shown = [line for line in lines if not line.startswith(("parallm serve ", "parallm train "))]  # as `test_options`
    surface.check("commands", shown)


def test_sampling_parameters_in_the_guide() -> None:
    surface.check_table(surface.GUIDE, "sampling parameters", surface.sampling_parameters())
