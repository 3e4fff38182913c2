"""ONE table of the old names: module of `mindio_ttp` -> name -> where it is here.

`mindio_tft_patch.old_names` makes modules of it. What stands in a target is imported when the name is first used, so
that `import mindio_ttp` costs nothing and needs no torch.
"""

from __future__ import annotations

_API = "mindio_tft_patch.adaptors.sdk.api"
_CONTROLLER = "mindio_tft_patch.adaptors.sdk.controller"
_ENUMS = "mindio_tft_patch.adaptors.sdk.enums"
_OLD_STYLE = "mindio_tft_patch.adaptors.sdk.old_style"
_LEGACY = "mindio_tft_patch.adaptors.megatron_legacy.sdk"

_REGISTER = (
    "tft_register_rename_handler",
    "tft_register_save_ckpt_handler",
    "tft_register_exit_handler",
    "tft_register_stop_handler",
    "tft_register_clean_handler",
    "tft_register_rebuild_group_handler",
    "tft_register_repair_handler",
    "tft_register_rollback_handler",
    "tft_register_stream_sync_handler",
    "tft_register_zit_upgrade_rollback_handler",
    "tft_register_zit_upgrade_repair_handler",
    "tft_register_zit_upgrade_rebuild_handler",
    "tft_register_zit_downgrade_rebuild_handler",
    "tft_register_decrypt_handler",
    "tft_register_exception_handler",
)
_TRAINING = (
    "tft_init_processor",
    "tft_start_processor",
    "tft_destroy_processor",
    "tft_is_reboot_node",
    "tft_get_reboot_type",
    "tft_set_optimizer_replica",
    "tft_set_dp_group_info",
    "tft_start_updating_os",
    "tft_start_copy_os",
    "tft_end_updating_os",
    "tft_reset_limit_step",
    "tft_report_load_ckpt_step",
    "tft_exception_handler",
    "tft_set_step_args",
    "tft_pause_train",
    "tft_report_error",
    "tft_wait_next_action",
    "tft_get_repair_step",
    "tft_get_repair_type",
    "set_mindio_export_version",
)
_UNDOCUMENTED = ("get_mindio_export_version", "get_device")  # used by MindSpeed-LLM
_TIMES = ("tft_can_do_uce_repair", "tft_set_update_start_time", "tft_set_update_end_time")
_ENUM_NAMES = ("OptimizerType", "Action", "ReportState", "RepairType")
_CONTROLLER_LIFE = ("tft_init_controller", "tft_start_controller", "tft_destroy_controller")
_MANAGER = (
    "tft_notify_controller_dump",
    "tft_notify_controller_stop_train",
    "tft_notify_controller_on_global_rank",
    "tft_notify_controller_prepare_action",
    "tft_notify_controller_change_strategy",
    "tft_register_mindx_callback",
    "tft_query_high_availability_switch",
)
_FIRST_GENERATION = (
    "ttp_init_controller",
    "ttp_start_controller",
    "ttp_init_processor",
    "ttp_start_processor",
    "ttp_register_save_ckpt_handler",
    "ttp_register_rename_handler",
    "ttp_set_ckpt_args",
    "ttp_start_updating_os",
    "ttp_end_updating_os",
    "ttp_to_persist",
)
_MEGATRON = ("load_checkpoint", "ttp_save_checkpoint", "rename_save_result", "ReplicatedOptimizer")


def _in(module: str, *groups: tuple[str, ...]) -> dict[str, str]:
    return {name: f"{module}:{name}" for group in groups for name in group}


_RANK = _in(_API, _REGISTER, _TRAINING) | _in(_ENUMS, _ENUM_NAMES)

TABLE: dict[str, dict[str, str]] = {
    "mindio_ttp": {},
    "mindio_ttp.framework_ttp": _RANK
    | _in(_CONTROLLER, _CONTROLLER_LIFE)
    | _in(_API, ("tft_can_do_uce_repair",))
    | _in(_OLD_STYLE, _FIRST_GENERATION),
    "mindio_ttp.framework_ttp.ttp_decorator": _RANK | _in(_API, _UNDOCUMENTED),
    "mindio_ttp.controller_ttp": _in(_CONTROLLER, _CONTROLLER_LIFE, _MANAGER)
    # The documents name it here, the original has it in framework_ttp.
    | _in(_API, ("tft_set_dp_group_info",)),
    "mindio_ttp.utils": _in(_API, _TIMES),
    "mindio_ttp.megatron_ttp": _in(_LEGACY, _MEGATRON),
}
