"""A process that has imported what a rank imports, and becomes the rank that its launcher names.

    python -u -m mindio_tft_patch.launch.standby [-m] SCRIPT ARGUMENTS...

Started by `ttprun --standby` only (launch.reserve is the other side). It imports torch, Megatron and the plugin,
touches no device, opens no socket and writes nothing; then it waits. When its order comes it takes over environment,
log files and folder, and runs the script as `python SCRIPT` would: sys.argv, sys.path and `__main__` are the script's,
so that multiprocessing's spawned children find it too. When the pipe is closed without an order, it ends.
"""

from __future__ import annotations

import builtins
import contextlib
import gc
import importlib
import importlib.util
import io
import json
import os
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec, SourceFileLoader
from typing import Any

# What a rank imports until its first step. Not every release of torch and Megatron has all of it.
_PLUGIN = ("mindio_tft_patch.adaptors.orphans", "mindio_tft_patch.processor.client", "mindio_tft_patch.processor.guard")
_MODULES = (
    "numpy.random",
    "torch",
    "torch.distributed",
    "torch.utils.data",
    "torch._dynamo.convert_frame",
    "torch._functorch._aot_autograd.runtime_wrappers",
    "torch._inductor.standalone_compile",
    "torch._inductor.test_operators",
    "torch.onnx",
)
_MEGATRON = (
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.training.arguments",
    "megatron.training.checkpointing",
    "megatron.training.training",
    "megatron.core.datasets.blended_megatron_dataset_builder",
    "megatron.core.datasets.gpt_dataset",
    "megatron.core.dist_checkpointing.strategies.cached_metadata_filesystem_reader",
    "megatron.core.models.mimo",
    "megatron.core.tokenizers.text.text_tokenizer",
    "megatron.training.argument_utils",
    "mindio_tft_patch.adaptors.megatron.install",
    "mindio_tft_patch.adaptors.device.gloo",
)
# Its adaptor has to be imported before Megatron, and by the script.
_MEGATRON_FOLLOWS = ("mindspeed", "mindspeed_llm")
# Lets torch ask for devices without making a driver context in this process.
_NO_CONTEXT = "PYTORCH_NVML_BASED_CUDA_CHECK"


class Program:
    """The command line of a rank, without interpreter and its options.

    Args:
        words: `-m MODULE ARGUMENTS...` or `SCRIPT ARGUMENTS...`.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.is_module = words[0] == "-m"
        self.name = words[1] if self.is_module else words[0]
        self.arguments = list(words[2:] if self.is_module else words[1:])

    @property
    def folder(self) -> str:
        """What Python puts in front of sys.path."""
        return os.getcwd() if self.is_module else os.path.dirname(os.path.realpath(self.name))

    def settle(self) -> None:
        """Make this process's sys the program's."""
        sys.argv = ["-m" if self.is_module else self.name, *self.arguments]
        if not getattr(sys.flags, "safe_path", False):
            sys.path[0] = self.folder

    def run(self, main: types.ModuleType) -> None:
        """Run it as the main program.

        main: an empty `__main__`. It stays what the program makes of it, also for threads that outlive its last line.

        Raises:
            BaseException: what the program raises.
        """
        if self.is_module:
            spec, code = _module_code(self.name)
            sys.argv[0] = main.__file__ = spec.origin or self.name
            main.__spec__, main.__loader__, main.__package__ = spec, spec.loader, spec.parent
        else:
            main.__file__ = os.path.abspath(self.name)
            main.__loader__ = SourceFileLoader("__main__", main.__file__)
            with io.open_code(main.__file__) as file:
                code = compile(file.read(), main.__file__, "exec")
        exec(code, main.__dict__)


def _module_code(name: str) -> tuple[ModuleSpec, types.CodeType]:
    """What `python -m NAME` runs."""
    spec = importlib.util.find_spec(name)
    if spec is not None and spec.submodule_search_locations is not None:
        return _module_code(f"{name}.__main__")
    code = spec.loader.get_code(name) if spec is not None and isinstance(spec.loader, InspectLoader) else None
    if spec is None or code is None:
        raise ModuleNotFoundError(f"No module named {name}")
    return spec, code


def preload(program: Program) -> None:
    """Import what the rank will import."""
    from mindio_tft_patch.adaptors.device import cpu

    _import(_PLUGIN)
    if cpu.wanted(program.arguments, os.environ):
        cpu.install_cpu_stand_in()
    _import(_MODULES)
    if not any(importlib.util.find_spec(name) for name in _MEGATRON_FOLLOWS):
        _import(_MEGATRON)
        from mindio_tft_patch.adaptors.megatron import parser_texts

        parser_texts.read_ahead()
    gc.collect()


def _import(names: Sequence[str]) -> None:
    for name in names:
        # Whatever an import has against this machine, the rank itself is the one to say so.
        with contextlib.suppress(Exception):
            importlib.import_module(name)


def become(order: Mapping[str, Any], imported: Mapping[str, str], streams: Sequence[int]) -> Program:
    """Take over everything of the rank but its program.

    Args:
        order: launch.reserve.Order.
        imported: variables that imports have set, as they would in the rank.
        streams: the launcher's standard output and error.
    """
    os.environ.clear()
    os.environ.update({**imported, **order["environ"]})
    os.chdir(order["cwd"])
    for number, path, kept in zip((1, 2), (order["stdout"], order["stderr"]), streams, strict=True):
        source = kept if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        os.dup2(source, number)
        os.close(source)
        if source != kept:
            os.close(kept)
    if order["cpus"]:
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), order["cpus"])
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.orig_argv = list(order["args"])
    return Program(order["args"][2:])


def fresh_main() -> types.ModuleType:
    """Put an empty `__main__` in the place of ours."""
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    # Under this name multiprocessing looks for what spawned children have pickled.
    sys.modules["__mp_main__"] = main
    return main


def _wait_for_order(orders: int, answers: int) -> dict[str, Any]:
    os.write(answers, b"ready\n")
    content = b""
    while received := os.read(orders, 65536):
        content += received
    if not content:
        os._exit(0)
    os.write(answers, b"accepted\n")
    os.close(orders)
    os.close(answers)
    return dict(json.loads(content))


def main() -> None:
    """Entry point of a stand-by."""
    from mindio_tft_patch.adaptors.orphans import die_with_parent

    die_with_parent()
    orders, answers, launcher = (int(number) for number in os.environ.pop("TFT_STANDBY").split(","))
    if os.getppid() != launcher:
        return  # it has ended already, and the imports would be for nothing
    for descriptor in (orders, answers):
        os.set_inheritable(descriptor, False)
    streams = [os.dup(1), os.dup(2)]
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 1)
    os.dup2(silence, 2)
    os.close(silence)
    program = Program(sys.argv[1:])
    program.settle()
    before = dict(os.environ)
    os.environ.setdefault(_NO_CONTEXT, "1")
    preload(program)
    if _NO_CONTEXT not in before:
        del os.environ[_NO_CONTEXT]
    imported = {name: value for name, value in os.environ.items() if before.get(name) != value}
    program = become(_wait_for_order(orders, answers), imported, streams)
    program.settle()
    kept = sys.modules["__main__"]  # its names are ours as long as this function runs
    fresh = fresh_main()
    import mindio_tft_patch

    # The script's `import mindio_tft_patch` finds it imported already.
    mindio_tft_patch.activate(sys.argv[1:], os.environ)
    program.run(fresh)
    del kept


if __name__ == "__main__":
    main()
