"""torchrun with TaskD's agent: in place of a line edited into torch's own run.py."""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import taskd.python.adaptor.patch  # noqa: F401  (puts TaskD's agent in the place of torch's)
from torch.distributed.launcher import api
from torch.distributed.run import main


def without_unknown_options(launch: Callable[..., Any]) -> Callable[..., Any]:
    """`launch` for newer releases of torch, which hand over options that TaskD's function has not; none is in use."""
    known = inspect.signature(launch).parameters

    @functools.wraps(launch)
    def call(*args: Any, **options: Any) -> Any:
        return launch(*args, **{name: value for name, value in options.items() if name in known or value is not None})

    return call


if __name__ == "__main__":
    api.launch_agent = without_unknown_options(api.launch_agent)
    main()
