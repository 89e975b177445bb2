"""Tasks by the names that `--task` takes: built-in ones, environments, those of packages and files, and one's own."""

from mlx_parallm.errors import ConfigError
from mlx_parallm.training.integrations.verifiers_env import VerifiersTask
from mlx_parallm.training.tasks.built_in import TASKS, Gsm8k, ReasoningGym, Task
from mlx_parallm.training.tasks.environments import BUILT_IN, Environment, EnvironmentTask
from mlx_parallm.training.tasks.scorers import load_function


def find_task(name: str) -> Task:
    """A built-in task or environment, one of a package or a file, or one's own as `module:name` or `file.py:name`."""
    if name in TASKS:
        return TASKS[name]
    if name in BUILT_IN:
        return EnvironmentTask(name, BUILT_IN[name])
    kind, _, rest = name.partition(":")
    if kind == "reasoning_gym" and rest:
        return ReasoningGym(rest)
    if kind == "gsm8k" and rest:
        return Gsm8k(rest)
    if kind == "verifiers" and rest:
        return VerifiersTask(rest)
    if rest:
        loaded = load_function(name)
        if isinstance(loaded, type) and issubclass(loaded, Environment):
            return EnvironmentTask(name, loaded)
        task = loaded() if isinstance(loaded, type) else loaded
        if isinstance(task, Task):
            return task
    raise ConfigError(
        f"there is no task {name!r}; there is {', '.join([*TASKS, *BUILT_IN])}, reasoning_gym:NAME, gsm8k:FILE, "
        "verifiers:NAME, and your own as module:Class or file.py:Class"
    )
