"""The old names: which there are, with which parameters and defaults, and where they lead.

SIGNATURES is written down here, and not read from the code, from the documents of the SDK (component/mindio/tft/doc/api
of MindCluster) and, for names that they leave out, from the calls of its clients.
"""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest

from mindio_tft_patch import old_names
from mindio_tft_patch.adaptors.sdk.callbacks import KINDS
from mindio_tft_patch.adaptors.sdk.names import TABLE

NOTHING: dict[str, object] = {}
REQUIRED = "(required)"
FUNC_CTX = {"func": REQUIRED, "ctx": None}

FRAMEWORK: dict[str, dict[str, object]] = {
    "tft_init_controller": {
        "rank": REQUIRED,
        "world_size": REQUIRED,
        "enable_local_copy": REQUIRED,
        "enable_arf": False,
        "enable_zit": False,
    },
    "tft_start_controller": {"bind_ip": REQUIRED, "port": REQUIRED, "enable_tls": True, "tls_info": ""},
    "tft_destroy_controller": NOTHING,
    "tft_init_processor": {
        "rank": REQUIRED,
        "world_size": REQUIRED,
        "enable_local_copy": REQUIRED,
        "enable_tls": True,
        "tls_info": "",
        "enable_uce": True,
        "enable_arf": False,
        "enable_zit": False,
    },
    "tft_start_processor": {"master_ip": REQUIRED, "port": REQUIRED, "local_ip": ""},
    "tft_destroy_processor": NOTHING,
    "tft_start_updating_os": {"backup_step": -1},
    "tft_start_copy_os": NOTHING,
    "tft_end_updating_os": {"step": REQUIRED},
    "tft_set_optimizer_replica": {"rank": REQUIRED, "replica_info": REQUIRED},
    "tft_exception_handler": {"func": REQUIRED},
    "tft_set_step_args": {"args": REQUIRED},
    "tft_register_rename_handler": FUNC_CTX,
    "tft_register_save_ckpt_handler": FUNC_CTX,
    "tft_register_exit_handler": FUNC_CTX,
    "tft_register_stop_handler": FUNC_CTX,
    "tft_register_clean_handler": FUNC_CTX,
    "tft_register_rebuild_group_handler": FUNC_CTX,
    "tft_register_repair_handler": FUNC_CTX,
    "tft_register_rollback_handler": FUNC_CTX,
    "tft_register_stream_sync_handler": FUNC_CTX,
    "tft_register_zit_upgrade_rollback_handler": FUNC_CTX,
    "tft_register_zit_upgrade_repair_handler": FUNC_CTX,
    "tft_register_zit_upgrade_rebuild_handler": FUNC_CTX,
    "tft_register_zit_downgrade_rebuild_handler": FUNC_CTX,
    "tft_register_exception_handler": {"fault_pattern": REQUIRED, "fault_type": REQUIRED, "fault_handle": REQUIRED},
    "tft_register_decrypt_handler": {"decryptor": REQUIRED},
    "tft_report_error": {"error_type": REQUIRED, "error_code": ""},
    "tft_wait_next_action": NOTHING,
    "tft_get_repair_step": NOTHING,
    "tft_get_repair_type": NOTHING,
    "tft_is_reboot_node": NOTHING,
    "tft_get_reboot_type": NOTHING,
    "tft_reset_limit_step": NOTHING,
    "tft_set_dp_group_info": {"rank": REQUIRED, "dp_rank_list": REQUIRED},
    "tft_report_load_ckpt_step": {"step": REQUIRED},
    "tft_can_do_uce_repair": {"hbm_error_time": REQUIRED, "start_time": None, "end_time": None},
    "tft_pause_train": {"cur_step": REQUIRED},
    "set_mindio_export_version": {"framework_type": REQUIRED},
    # The first generation, as the first of the seeds calls it.
    "ttp_init_controller": {
        "rank": REQUIRED,
        "world_size": REQUIRED,
        "replica_offset": REQUIRED,
        "enable_local_copy": REQUIRED,
    },
    "ttp_start_controller": {"bind_ip": REQUIRED, "port": REQUIRED},
    "ttp_init_processor": {
        "rank": REQUIRED,
        "dp_ranks": REQUIRED,
        "dp_size": REQUIRED,
        "world_size": REQUIRED,
        "replica_offset": REQUIRED,
        "enable_local_copy": REQUIRED,
    },
    "ttp_start_processor": {"master_ip": REQUIRED, "port": REQUIRED},
    "ttp_register_save_ckpt_handler": FUNC_CTX,
    "ttp_register_rename_handler": FUNC_CTX,
    "ttp_set_ckpt_args": {"args": REQUIRED},
    "ttp_start_updating_os": {"backup_step": REQUIRED},
    "ttp_end_updating_os": {"step": REQUIRED},
    "ttp_to_persist": {"func": REQUIRED},
}
CONTROLLER: dict[str, dict[str, object]] = {
    "tft_notify_controller_dump": NOTHING,
    "tft_notify_controller_stop_train": {"fault_ranks": REQUIRED, "stop_type": "stop", "timeout": None},
    "tft_notify_controller_on_global_rank": {"fault_ranks": REQUIRED, "time": 1},
    "tft_notify_controller_prepare_action": {"action": REQUIRED, "fault_ranks": None},
    "tft_notify_controller_change_strategy": {"strategy": REQUIRED, "params": ""},
    "tft_register_mindx_callback": {"action": REQUIRED, "func": REQUIRED},
    "tft_query_high_availability_switch": NOTHING,
    "tft_init_controller": FRAMEWORK["tft_init_controller"],
    "tft_start_controller": FRAMEWORK["tft_start_controller"],
    "tft_destroy_controller": NOTHING,
    "tft_set_dp_group_info": FRAMEWORK["tft_set_dp_group_info"],
}
UTILS: dict[str, dict[str, object]] = {
    "tft_can_do_uce_repair": FRAMEWORK["tft_can_do_uce_repair"],
    "tft_set_update_start_time": {"start_time": None},
    "tft_set_update_end_time": {"end_time": None},
}
DECORATOR: dict[str, dict[str, object]] = {"get_device": NOTHING, "get_mindio_export_version": NOTHING} | {
    name: FRAMEWORK[name] for name in ("tft_report_load_ckpt_step", "tft_get_repair_type", "tft_exception_handler")
}
SIGNATURES = [
    (module, name, parameters)
    for module, functions in {
        "mindio_ttp.framework_ttp": FRAMEWORK,
        "mindio_ttp.framework_ttp.ttp_decorator": DECORATOR,
        "mindio_ttp.controller_ttp": CONTROLLER,
        "mindio_ttp.utils": UTILS,
    }.items()
    for name, parameters in functions.items()
]
ENUMS = {
    "OptimizerType": {"ATTENTION": 0, "MOE": 1},
    "Action": {"RETRY": 0, "EXIT": 1},
    "ReportState": {
        "RS_NORMAL": 0,
        "RS_RETRY": 1,
        "RS_UCE": 2,
        "RS_UCE_CORRUPTED": 3,
        "RS_HCCL_FAILED": 4,
        "RS_INIT_FINISH": 5,
        "RS_PREREPAIR_FINISH": 6,
        "RS_STEP_FINISH": 7,
        "RS_UNKNOWN": 8,
    },
    "RepairType": {
        "RT_SEND": 0,
        "RT_UCE_HIGHLEVEL": 1,
        "RT_UCE_LOWLEVEL": 2,
        "RT_RECV_REPAIR": 3,
        "RT_ROLLBACK": 4,
        "RT_LOAD_CKPT": 5,
        "RT_LOAD_REBUILD": 6,
    },
}


@pytest.fixture(autouse=True)
def ours(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(old_names.SWITCH, "ours")
    finders = list(sys.meta_path)
    old_names.uninstall()
    old_names.install()
    yield
    old_names.uninstall()
    sys.meta_path[:] = finders


def parameters_of(function: object) -> dict[str, object]:
    found = inspect.signature(function).parameters  # type: ignore[arg-type]
    assert all(one.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD for one in found.values())
    return {name: REQUIRED if one.default is inspect.Parameter.empty else one.default for name, one in found.items()}


@pytest.mark.parametrize(("module", "name", "expected"), SIGNATURES, ids=[f"{one[0]}.{one[1]}" for one in SIGNATURES])
def test_a_function_has_the_documented_parameters(module: str, name: str, expected: dict[str, object]) -> None:
    function = getattr(importlib.import_module(module), name)
    found = parameters_of(function)
    assert found == expected
    assert list(found) == list(expected)
    assert inspect.getdoc(function), "it has no docstring"
    assert function.__name__ == name


@pytest.mark.parametrize("name", ENUMS)
def test_an_enumeration_has_the_numbers_of_the_original(name: str) -> None:
    enumeration = getattr(importlib.import_module("mindio_ttp.framework_ttp"), name)
    assert {member.name: member.value for member in enumeration} == ENUMS[name]


def test_no_name_of_the_table_is_forgotten_here() -> None:
    told = {(module, name) for module, name, _ in SIGNATURES}
    told |= {("mindio_ttp.framework_ttp", name) for name in ENUMS}
    whole = {(module, name) for module, names in TABLE.items() for name in names}
    left = {(module, name) for module, name in whole - told if module != "mindio_ttp.framework_ttp.ttp_decorator"}
    assert {name for module, name in left if module == "mindio_ttp.megatron_ttp"} == {
        "load_checkpoint",
        "ttp_save_checkpoint",
        "rename_save_result",
        "ReplicatedOptimizer",
    }
    assert {module for module, _ in left} == {"mindio_ttp.megatron_ttp"}
    assert told <= whole


def test_what_stands_in_two_modules_is_the_same() -> None:
    for names in (TABLE["mindio_ttp.framework_ttp.ttp_decorator"], TABLE["mindio_ttp.controller_ttp"]):
        framework = TABLE["mindio_ttp.framework_ttp"]
        assert all(framework[name] == where for name, where in names.items() if name in framework)


def test_the_fifteen_register_functions_come_from_one_table() -> None:
    framework = importlib.import_module("mindio_ttp.framework_ttp")
    names = [name for name in FRAMEWORK if name.startswith("tft_register_")]
    assert len(names) == 15
    assert sorted(kind.function for kind in KINDS) == sorted(names)
    assert len({getattr(framework, name).__wrapped__.__code__ for name in names}) == 1


def test_a_star_import_brings_all_names() -> None:
    space: dict[str, object] = {}
    exec("from mindio_ttp.framework_ttp import *", space)
    assert set(FRAMEWORK) | set(ENUMS) <= set(space)


def test_a_name_that_is_none_is_refused_as_by_any_module() -> None:
    framework = importlib.import_module("mindio_ttp.framework_ttp")
    with pytest.raises(AttributeError, match="has no attribute 'tft_fly'"):
        framework.tft_fly  # noqa: B018
    with pytest.raises(ImportError):
        exec("from mindio_ttp.framework_ttp import tft_fly")
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("mindio_ttp.nothing")


def test_a_module_lists_its_names() -> None:
    assert set(UTILS) <= set(dir(importlib.import_module("mindio_ttp.utils")))


def test_submodules_can_be_imported_from_their_package() -> None:
    from mindio_ttp import framework_ttp  # type: ignore[import-not-found]
    from mindio_ttp.framework_ttp import ttp_decorator  # type: ignore[import-not-found]

    assert isinstance(framework_ttp, ModuleType)
    assert ttp_decorator.tft_get_repair_type is framework_ttp.tft_get_repair_type
