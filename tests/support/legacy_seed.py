"""The Megatron-LM of 2023 with MindIO TTP put in by hand, as its integration guide says: a copy of the tree, edited."""

from __future__ import annotations

import shutil
from pathlib import Path

# file -> (what is there, what takes its place)
_EDITS: dict[str, list[tuple[str, str]]] = {
    "megatron/training.py": [
        (
            "import torch\nfrom torch.nn.parallel",
            "import torch\nimport mindio_ttp.framework_ttp as ttp\nimport mindio_ttp.megatron_ttp as mega\n"
            "from torch.nn.parallel",
        ),
        (
            "args.iteration = load_checkpoint(model, optimizer, opt_param_scheduler)",
            "args.iteration = mega.load_checkpoint(model, optimizer, opt_param_scheduler)",
        ),
        (
            "    optimizer.reduce_model_grads(args, timers)\n",
            "    optimizer.reduce_model_grads(args, timers)\n    torch.distributed.barrier()\n",
        ),
        (
            "    timers('optimizer', log_level=1).start(barrier=args.barrier_with_L1_time)\n",
            "    timers('optimizer', log_level=1).start(barrier=args.barrier_with_L1_time)\n"
            "    ttp.ttp_start_updating_os(-1)\n",
        ),
        (
            "    update_successful, grad_norm, num_zeros_in_grad = optimizer.step(args, timers)\n",
            "    update_successful, grad_norm, num_zeros_in_grad = optimizer.step(args, timers)\n"
            "    if hasattr(optimizer, 'increase_step'):\n"
            "        optimizer.increase_step()\n"
            "    ttp.ttp_end_updating_os(optimizer.current_step)\n",
        ),
        ("\ndef train(forward_step_func, model,", "\n@ttp.ttp_to_persist\ndef train(forward_step_func, model,"),
        (
            "    # Tracking loss.\n    total_loss_dict = {}\n",
            "    # Tracking loss.\n    total_loss_dict = {}\n"
            "    cur_rank = torch.distributed.get_rank()\n"
            "    world_size: int = torch.distributed.get_world_size()\n"
            "    import os\n"
            "    masterIp = os.getenv('MASTER_ADDR', '127.0.0.1')\n"
            "    port = int(os.environ['TTP_PORT'])\n"  # the guide has 8000; tests run beside each other
            "    dp_ranks = mpu.get_data_parallel_all_rank()\n"
            "    if cur_rank == 0:\n"
            "        ttp.ttp_init_controller(cur_rank, world_size, len(dp_ranks)//2, False)\n"
            "        ttp.ttp_start_controller(masterIp, port)\n"
            "    ttp.ttp_init_processor(cur_rank, dp_ranks, len(dp_ranks), world_size, len(dp_ranks)//2, False)\n"
            "    ttp.ttp_start_processor(masterIp, port)\n"
            "    ttp.ttp_register_save_ckpt_handler(mega.ttp_save_checkpoint)\n"
            "    ttp.ttp_register_rename_handler(mega.rename_save_result)\n",
        ),
        (
            "        iteration += 1\n        args.consumed_train_samples",
            "        iteration += 1\n"
            "        ttp.ttp_set_ckpt_args((iteration, model, optimizer, opt_param_scheduler))\n"
            "        args.consumed_train_samples",
        ),
    ],
    "megatron/optimizer/__init__.py": [
        (
            "\nfrom .distrib_optimizer",
            "\nfrom mindio_ttp.megatron_ttp import ReplicatedOptimizer\nfrom .distrib_optimizer",
        ),
        ("opt_ty = DistributedOptimizer \\", "opt_ty = ReplicatedOptimizer \\"),
    ],
    "megatron/core/parallel_state.py": [
        ("_GLOBAL_MEMORY_BUFFER = None\n", "_GLOBAL_MEMORY_BUFFER = None\nall_data_parallel_group_ranks = None\n"),
        (
            "    global _DATA_PARALLEL_GLOBAL_RANKS\n",
            "    global _DATA_PARALLEL_GLOBAL_RANKS\n    global all_data_parallel_group_ranks\n",
        ),
        (
            "\ndef model_parallel_is_initialized",
            "\ndef get_data_parallel_all_rank():\n"
            "    assert _DATA_PARALLEL_GLOBAL_RANKS is not None\n"
            "    return _DATA_PARALLEL_GLOBAL_RANKS\n\n\n"
            "def get_all_data_parallel_ranks():\n"
            "    return all_data_parallel_group_ranks\n\n\n"
            "def model_parallel_is_initialized",
        ),
    ],
}


def edited_copy(tree: Path, folder: Path) -> Path:
    """Copy the tree and edit the copy; returns its path. An edit that does not fit fails."""
    shutil.copytree(tree / "megatron", folder / "megatron", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    shutil.copy(tree / "pretrain_gpt.py", folder)
    for name, edits in _EDITS.items():
        path = folder / name
        text = path.read_text()
        for before, after in edits:
            assert before in text, f"{name} has no {before!r}"
            text = text.replace(before, after, 1)
        path.write_text(text)
    return folder
