"""Tasks by name (`--task`)."""

from __future__ import annotations

from importlib import import_module
from inspect import isabstract
from traceback import extract_tb

from hvd_bert.config.settings import TASKS, Config
from hvd_bert.distributed.world import World
from hvd_bert.errors import UserError
from hvd_bert.tasks.base import Task


def task_class(name: str) -> type[Task]:
    """The class of a task by its name in TASKS, or by MODULE:CLASS. Raises UserError if there is none."""
    module, _, class_name = TASKS.get(name, name).partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), class_name)):
        raise UserError(f"--task {name}: not a module and a class. Give MODULE:CLASS, such as digits:Digits.")
    try:
        found = getattr(import_module(module), class_name, None)
    except Exception as error:
        if name in TASKS or isinstance(error, UserError):  # this package or one that it needs is damaged
            raise
        raise UserError(f"--task {name}: {_reason(module, error)}") from None
    if not (isinstance(found, type) and issubclass(found, Task)):
        raise UserError(f"--task {name}: {module} has no class {class_name} that is a subclass of Task.")
    if isabstract(found):
        raise UserError(f"--task {name}: it lacks the methods {', '.join(sorted(found.__abstractmethods__))}.")
    return found


def _reason(module: str, error: Exception) -> str:
    """Why a module cannot be imported, with the place of the mistake, and what to do."""
    if isinstance(error, ModuleNotFoundError):
        if f"{module}.".startswith(f"{error.name}."):
            return f"{error}. Run the command in the folder of the module, or add that folder to PYTHONPATH."
        return f"{module} cannot be imported: {error}. Install it."  # the module itself is there
    frame = extract_tb(error.__traceback__)[-1]
    file, line = (error.filename, error.lineno) if isinstance(error, SyntaxError) else (frame.filename, frame.lineno)
    text = error.msg if isinstance(error, SyntaxError) else str(error)  # its str() repeats the place
    return f"{module} cannot be imported: {file}, line {line}: {type(error).__name__}: {text}. Fix the file."


def load_task(config: Config, world: World) -> Task:
    """The task of --task with its model and data, loaded and checked, without collectives. Raises UserError.

    Sets --metric_for_best_model to the task's default if it is not given.
    """
    name, args = config.data.task, config.checkpoint
    task = task_class(name)(config, world)
    if task.plan and not any(parameter.requires_grad for parameter in task.model.parameters()):
        raise UserError(f"--task {name}: all parameters of its model are frozen. Set requires_grad on those to train.")
    args.metric_for_best_model = args.metric_for_best_model or next(iter(task.metrics))
    if args.metric_for_best_model not in task.metrics:
        raise UserError(
            f"--metric_for_best_model {args.metric_for_best_model}: --task {name} does not give it."
            f" Choose one of {', '.join(task.metrics)}."
        )
    return task
